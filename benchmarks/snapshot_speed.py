"""How fast a fleet saves and loads a snapshot, beside the disk's own speed and torch with the same bytes.

    python benchmarks/snapshot_speed.py [--rows 5000000] [--servers 1] [--runs 3] [--only psfleet]

One table of 16 weights under Adam, 208 bytes a row in the file; nothing else runs on the servers. A round
has in turn: plain writes of the same bytes with fsync, a save of the fleet, `torch.save` with fsync,
`torch.distributed.checkpoint`; then plain reads with SHA-256, a load by the fleet, torch.load and
torch.distributed.checkpoint.load. All files are on the disk before a save ends, and out of the page cache
before a read begins. Medians of the rounds; CPU is that of the servers, or of this process for torch.

With --train a worker makes steps of W1 (w1_sparse.py) meanwhile, and only saves are measured: the steps a
second with and without a snapshot, in turn, and how long a save takes with and without steps.
"""

import argparse
import contextlib
import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from data import batches_w1
from measuring import cpu_seconds, machine

from psfleet.core.base.files import sync
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, TableState
from psfleet.core.engine.schema.table import TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from tests.trainings import in_threads  # noqa: E402 - found by the line before

TABLE = TableSpec("t", "sparse", (16,), make_rule("adam", {}), seed=1)
ROW_BYTES = 208  # id, step, weights and two states
_PART = 100_000  # rows of one write
_PIECE = 8 << 20  # bytes of one plain write or read


def fill(runtime: ClusterRuntime, rows: int) -> None:
    """Make the rows."""
    values = np.random.default_rng(1).standard_normal((_PART, 16), np.float32)
    for first in range(0, rows, _PART):
        ids = np.arange(first, min(first + _PART, rows), dtype=np.int64)
        part = [values[: len(ids)] for _ in TABLE.slot_names]
        runtime.write_table(TABLE.key, TableState(1, part, ids))


def write_plainly(path: Path, size: int) -> None:
    """Write so many bytes, and wait for the disk."""
    content = os.urandom(_PIECE)
    with path.open("wb", buffering=0) as file:
        for _ in range(size // _PIECE):
            file.write(content)
        os.fsync(file.fileno())


def read_plainly(path: Path) -> None:
    """Read a file for its checksum."""
    with path.open("rb", buffering=0) as file:
        hashlib.file_digest(file, "sha256")


def drop(place: Path) -> None:
    """Take the files of a folder, which are on the disk, out of the page cache."""
    for path in [place] if place.is_file() else filter(Path.is_file, place.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_all(place: Path) -> None:
    """Wait until a file, or all files of a folder, are on the disk."""
    for path in [place] if place.is_file() else filter(Path.is_file, place.rglob("*")):
        sync(path)


class Clock:
    """Takes wall and CPU seconds of each contender, and prints the medians."""

    def __init__(self, size: int) -> None:
        self._size = size / 1e9
        self._taken: dict[str, list[tuple[float, float]]] = {}

    def take(self, name: str, pids: list[int], work: Callable[[], Any]) -> None:
        """Measure one run."""
        cpu, start = cpu_seconds(pids), time.perf_counter()
        work()
        taken = time.perf_counter() - start, cpu_seconds(pids) - cpu
        self._taken.setdefault(name, []).append(taken)
        print(f"  {name:40} {taken[0]:7.2f} s, CPU {taken[1]:6.2f} s", flush=True)

    def show(self) -> None:
        """Print the medians."""
        for name, taken in self._taken.items():
            wall, cpu = (statistics.median(column) for column in zip(*taken, strict=True))
            print(
                f"{name:42} {wall:7.2f} s {1e3 * self._size / wall:7.0f} MB/s "
                f"{cpu / self._size:6.2f} CPU-s/GB"
            )


def torch_rounds(clock: Clock, folder: Path, rows: int) -> Callable[[], None]:
    """Return a round of torch's own ways, or nothing to do where torch is missing."""
    try:
        import torch
        import torch.distributed.checkpoint
    except ImportError:
        print("torch is not installed")
        return lambda: None
    torch.set_num_threads(1)
    dcp: Any = torch.distributed.checkpoint
    state: dict[str, Any] = {f"state{n}": torch.randn(rows, 16) for n in range(3)}
    state |= {name: torch.arange(rows) for name in ("ids", "steps")}
    us = [os.getpid()]

    def save() -> None:
        torch.save(state, folder / "torch.pt")
        sync_all(folder / "torch.pt")

    def save_distributed() -> None:
        dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
        sync_all(folder / "dcp")

    def one_round() -> None:
        clock.take("torch.save with fsync", us, save)
        clock.take("torch.distributed.checkpoint", us, save_distributed)
        drop(folder / "torch.pt")
        drop(folder / "dcp")
        clock.take(
            "load: torch.load", us, lambda: torch.load(folder / "torch.pt", weights_only=True)
        )
        loads = lambda: dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)  # noqa: E731
        clock.take("load: torch.distributed.checkpoint", us, loads)
        (folder / "torch.pt").unlink()
        shutil.rmtree(folder / "dcp")

    return one_round


def train(folder: Path, rows: int, servers: int, runs: int) -> None:
    """Measure steps of W1 beside saves, and saves beside steps."""
    batches = batches_w1(20, 1, rows)
    gradient = np.full((len(batches[0]), 16), 0.01, np.float32)
    over, steps, found = threading.Event(), 0, []

    def step(runtime: ClusterRuntime) -> None:
        nonlocal steps
        while not over.is_set():
            ids = batches[steps % len(batches)]
            runtime.pull([Read(TABLE.key, ids)])
            runtime.push([Gradient(TABLE.key, gradient, ids, 0.001)]).wait()
            steps += 1

    def rate(work: Callable[[], object]) -> tuple[float, float]:
        first, start = steps, time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        shutil.rmtree(folder / "saved", ignore_errors=True)
        return (steps - first) / seconds, seconds

    with LocalFleet(servers, 2) as fleet:
        environments = [fleet.environment(worker) for worker in range(2)]
        with ThreadPoolExecutor() as pool:  # each waits for the other
            one, other = pool.map(lambda e: ClusterRuntime(e, "async"), environments)
        for runtime in (one, other):
            runtime.create(TABLE)
        fill(one, rows)
        save = partial(other.save, str(folder / "saved"))
        _, alone = rate(save)
        training = threading.Thread(target=step, args=(one,))
        training.start()
        time.sleep(5)
        for _ in range(runs):
            (without, _), (beside, seconds) = rate(lambda: time.sleep(5)), rate(save)
            found.append((beside / without, seconds / alone))
            print(
                f"  {without:6.1f} steps/s, {beside:6.1f} beside a save of {seconds:.2f} s; "
                f"{alone:.2f} s without steps",
                flush=True,
            )
        over.set()
        training.join()
        in_threads([one.close, other.close])
    steps_ratio, seconds_ratio = (statistics.median(c) for c in zip(*found, strict=True))
    print(f"steps a second: {steps_ratio:.2f} times; seconds of a save: {seconds_ratio:.1f} times")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=["all", "psfleet"], default="all")
    parser.add_argument("--train", action="store_true")
    asked = parser.parse_args()
    size = asked.rows * ROW_BYTES
    print(machine(), f"{size / 1e9:.2f} GB")
    clock = Clock(size)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if asked.train:
            train(folder, asked.rows, asked.servers, asked.runs)
            return
        fleet = stack.enter_context(LocalFleet(asked.servers, 1))
        runtime = ClusterRuntime(fleet.environment(0), "async")
        runtime.create(TABLE)
        fill(runtime, asked.rows)
        pids, plain, saved = [p.pid for p in fleet.processes], folder / "plain", folder / "saved"
        torch_round = (
            (lambda: None) if asked.only != "all" else torch_rounds(clock, folder, asked.rows)
        )
        for _ in range(asked.runs):
            clock.take("plain writes with fsync", [os.getpid()], lambda: write_plainly(plain, size))
            clock.take("save", pids, lambda: runtime.save(str(saved)))
            drop(plain)
            clock.take("load: plain reads with SHA-256", [os.getpid()], lambda: read_plainly(plain))
            plain.unlink()
            drop(saved)
            clock.take("load", pids, lambda: runtime.load(str(saved)))
            shutil.rmtree(saved)
            torch_round()
        clock.show()
        print(machine())
        runtime.close()


if __name__ == "__main__":
    main()
