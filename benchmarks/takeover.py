"""Time for which a fleet with standbys stands still when a server is killed, or hangs.

    python benchmarks/takeover.py [--kills 30] [--hang [--hung-after 5]]

A job of 2 servers, 1 worker in async mode, --replicas 1. The worker waits until the standby of a server is
ready, kills the primary (SIGKILL) and pushes. A measurement is the time until that push is acknowledged. It
includes the launcher's detection, the takeover, the change of members, and the worker's reconnection. With
--hang the worker stops the primary (SIGSTOP) instead, and the detection takes --hung-after seconds. Servers
take turns; server 0 also hosts the coordinator. At the end a table that counts pushes shows that none is
lost.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec

COUNTS = TableSpec("counts", "dense", (20_000,), make_rule("sgd", {}))
PUSHES = 20  # between two kills


def work(kills: int, blow: signal.Signals) -> None:
    """Run the worker."""
    from psfleet import fleet
    from psfleet.core.base.settings.environment import read_environment
    from psfleet.core.runtime.process_runtime import current
    from psfleet.core.runtime.strategy import DistributedStrategy

    strategy = DistributedStrategy()
    strategy.a_sync = True
    fleet.init(strategy=strategy)
    folder = Path(read_environment(os.environ).servers[0].removeprefix("unix:")).parent
    active = current().active()
    active.create(COUNTS, np.zeros(20_000, np.float32))
    gradient = Gradient(COUNTS.key, np.full(20_000, -1, np.float32), None, 1.0)
    durations: list[float] = []
    for kill in range(kills):
        for _ in range(PUSHES):
            active.push([gradient])
            active.flush()
        server, before = kill % 2, kill // 2
        _pid(folder, server, before + 1)
        victim = _pid(folder, server, before)
        began = time.perf_counter()
        os.kill(victim, blow)
        active.push([gradient])
        active.flush()
        durations.append(time.perf_counter() - began)
    counted = active.pull([Read(COUNTS.key)])[0]
    exact = bool((counted == kills * (PUSHES + 1)).all())
    print("takeover", json.dumps({"seconds": durations, "exact": exact}))


def _pid(folder: Path, server: int, copy: int) -> int:
    """Wait for this ready file, and return the process id in it."""
    file = folder / (f"ready.{server}.{copy}" if copy else f"ready.{server}")
    while not file.exists():
        time.sleep(0.01)
    pid: int = json.loads(file.read_text())["pid"]
    return pid


def measure(kills: int, hang: bool, patience: float) -> None:
    """Run the job and print the results."""
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--replicas", "1"]
        command += ["--no-progress", "--log-dir", logs, "--hung-after", f"{patience}s"]
        command += [__file__, "--kills", str(kills), *(["--hang"] if hang else [])]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(process.stderr)
    line = next(line for line in process.stdout.splitlines() if line.startswith("takeover "))
    report = json.loads(line.removeprefix("takeover "))
    for server in (0, 1):
        times = report["seconds"][server::2]
        print(f"server {server}: median {statistics.median(times):.3f} s, worst {max(times):.3f} s")
    every = report["seconds"]
    print(
        f"{len(every)} takeovers: median {statistics.median(every):.3f} s, worst {max(every):.3f} s; "
        f"every push counted once: {report['exact']}; load {os.getloadavg()[0]:.1f} "
        f"on {os.cpu_count()} cores"
    )


def main() -> None:
    """Run the worker in a job's worker process; otherwise start the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--hung-after", type=float, default=5.0)
    options = parser.parse_args()
    if os.environ.get("PSFLEET_ROLE") == "worker":
        work(options.kills, signal.SIGSTOP if options.hang else signal.SIGKILL)
    else:
        measure(options.kills, options.hang, options.hung_after)


if __name__ == "__main__":
    main()
