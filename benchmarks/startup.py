"""Start-up: time from the command to the first step of 2 servers and 2 workers, warm cache and cold.

"warm": the kernels' machine code is in the cache. "cold": PSFLEET_CACHE is an empty folder. CPU is that of
the launcher and of all processes that it started.
"""

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from peers.torch_group import torch_crew
from processes import ROOT, environment
from reporting import Report, arguments, finish, torch_missing

SERVERS, WORKERS = 2, 2


def first_step() -> None:
    """Run the script of a worker: one step with the tables of W1, then write the time."""
    import psfleet

    with psfleet.connect() as ps:
        optimizer = psfleet.optimizer.Adam(1e-3)
        table = ps.sparse_table("rows", 16, optimizer)
        dense = ps.dense_table("dense", np.zeros(1000, np.float32), optimizer)
        ids = np.arange(1000, dtype=np.int64)
        gradient = table.pull(ids) + dense.pull()[:16]
        table.push(ids, gradient).wait()
        dense.push(np.ones(1000, np.float32)).wait()
        Path(os.environ["BENCH_FOLDER"], str(ps.worker_index)).write_text(repr(time.time()))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--no-cold", action="store_true", help="leave out the empty cache")
    options = parser.parse_args()
    report = Report(
        "startup",
        f"Start-up: command to first step, {SERVERS} servers + {WORKERS} workers on this machine",
    )
    missing = "left out" if options.no_peers else torch_missing()
    runs = 1 if options.short else options.runs
    launched(None)  # compiles kernels that are not in the cache yet
    report.rows.append(row("psfleet-launch, warm cache", [launched(None) for _ in range(runs)]))
    if not options.no_cold:
        report.rows.append(row("psfleet-launch, cold cache", [_cold() for _ in range(runs)]))
    if missing:
        report.skipped["torch rpc"] = missing
    else:
        report.rows.append(row("torch rpc", [_torch() for _ in range(runs)]))
    finish(report, options.json)


def launched(cache: str | None) -> tuple[float, float]:
    """Return the seconds until both workers have made a step, and the CPU seconds of the whole job."""
    with tempfile.TemporaryDirectory(prefix="psfleet-bench-") as folder:
        extra = {"BENCH_FOLDER": folder} | ({"PSFLEET_CACHE": cache} if cache else {})
        command = [
            sys.executable,
            "-m",
            "psfleet_launch",
            "--servers",
            str(SERVERS),
            "--workers",
            str(WORKERS),
            "--async",
            "--no-progress",
            "--log-dir",
            f"{folder}/logs",
            __file__,
            "--worker",
        ]
        cpu, start = _children(), time.time()
        process = subprocess.run(
            command, env=environment(**extra), cwd=ROOT, capture_output=True, text=True, check=False
        )
        if process.returncode:
            raise RuntimeError(f"psfleet-launch ended with {process.returncode}: {process.stderr}")
        end = max(float(Path(folder, str(rank)).read_text()) for rank in range(WORKERS))
        return end - start, _children() - cpu


def _cold() -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="psfleet-bench-") as cache:
        os.chmod(cache, 0o700)
        return launched(cache)


def _torch() -> tuple[float, float]:
    """Measure the same for torch's group of W3, whose tables of 1 M rows are allocated at the start."""
    cpu, start = _children(), time.time()
    with contextlib.ExitStack() as stack:
        crew = stack.enter_context(torch_crew("torch rpc", "w3", WORKERS))
        crew.run(1)
        seconds = time.time() - start
    return seconds, _children() - cpu


def _children() -> float:
    """Return the CPU seconds of all awaited child processes, and of their awaited children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def row(name: str, runs: list[tuple[float, float]]) -> dict[str, Any]:
    walls, cpus = zip(*runs, strict=True)
    return {
        "contender": name,
        "s to first step": statistics.median(walls),
        "fastest": min(walls),
        "slowest": max(walls),
        "CPU s of the job": statistics.median(cpus),
        "runs": len(runs),
    }


if __name__ == "__main__":
    if "--worker" in sys.argv:
        first_step()
    else:
        main()
