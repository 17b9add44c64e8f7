"""Counts the Python calls and source files of one operation, with server and worker in this process.

One server and one worker, tensors in shared memory, after a warm-up: a pull and a push of 8 ids, a step of a
torch model with two layers, a snapshot of 200 rows. And the launcher with a one-line script. Counts are
medians for each function, so that other threads' occasional calls are left out.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
from reporting import Report, arguments, finish, torch_missing

PACKAGES = ("psfleet", "psfleet_launch", "psfleet_server", "psfleet_worker")
DIM, IDS, ROWS = 16, 8, 200
QUIET = 0.02  # seconds without a call after which an operation has ended at both ends
_LAUNCHED = "PSFLEET_CALL_PATH"


class Recorder:
    """Profiler of all threads that counts calls of psfleet's functions."""

    def __init__(self) -> None:
        self.calls: list[CodeType] = []
        self._own: dict[CodeType, bool] = {}

    def start(self) -> None:
        """Count from now on, also in threads that start later."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def stop(self) -> None:
        """Stop counting, in this thread and in new ones."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        is_ours = self._own.get(code)
        if is_ours is None:
            path = Path(code.co_filename)
            is_ours = code.co_name != "<module>" and path.is_absolute() and _first(path) is not None
            self._own[code] = is_ours
        if is_ours:
            self.calls.append(code)

    def settled(self) -> None:
        """Wait until no thread makes calls."""
        known = -1
        while known != len(self.calls):
            known = len(self.calls)
            time.sleep(QUIET)

    def measured(self, operation: Callable[[], Any], runs: int) -> dict[CodeType, int]:
        """Return the number of calls of each function in one operation, in the order of the first calls."""
        counts: list[Counter[CodeType]] = []
        order: dict[CodeType, None] = {}
        for _ in range(runs):
            self.settled()
            self.calls.clear()
            operation()
            self.settled()
            counts.append(Counter(self.calls))
            order.update(dict.fromkeys(self.calls))
        medians = {
            code: int(statistics.median(counter[code] for counter in counts)) for code in order
        }
        return {code: count for code, count in medians.items() if count}


def totals(stations: list[dict[str, Any]]) -> dict[str, int]:
    """Return the numbers of calls, of distinct functions and of distinct files."""
    return {
        "calls": sum(station["calls"] for station in stations),
        "functions": len(stations),
        "files": len({station["file"] for station in stations}),
    }


def stations_of(counts: dict[CodeType, int]) -> list[dict[str, Any]]:
    """Return the rows of the table for an operation."""
    return [
        {"function": code.co_qualname, "file": _short(code.co_filename), "calls": count}
        for code, count in counts.items()
    ]


def _first(path: Path) -> int | None:
    """Return the index of psfleet's package in a file's path, or None outside psfleet."""
    parts = path.parts
    return max((index for index, part in enumerate(parts[:-1]) if part in PACKAGES), default=None)


def _short(path: str) -> str:
    """Return the path of a source file, beginning with its package."""
    return "/".join(Path(path).parts[_first(Path(path)) :])


@contextlib.contextmanager
def fleet_here(folder: Path) -> Iterator[Any]:
    """Yield a client of a server whose threads run in this process."""
    import psfleet
    from psfleet.core.base.settings.environment import Environment
    from psfleet_server.process import Server

    endpoint = f"unix:{folder}/server"
    with Server(Environment("server", 0, (endpoint,), 1)):
        # The client registers as the process's worker, so that psfleet.torch shares it.
        os.environ.update(
            PSFLEET_ROLE="worker", PSFLEET_RANK="0", PSFLEET_SERVERS=endpoint, PSFLEET_WORKERS="1"
        )
        with psfleet.connect() as client:
            yield client


def operations(client: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return the operations to measure, by name."""
    import psfleet

    table = client.sparse_table("rows", DIM, psfleet.optimizer.Adam(1e-3))
    table.push(np.arange(ROWS), np.ones((ROWS, DIM), np.float32)).wait()
    batches = iter(np.random.default_rng(0).integers(0, ROWS, (10_000, IDS)))
    gradient = np.full((IDS, DIM), 0.01, np.float32)
    last = [next(batches)]

    def pull() -> None:
        last[0] = next(batches)
        table.pull(last[0])

    def push() -> None:
        table.push(last[0], gradient).wait()

    saves = iter(range(1000))
    return {"pull": pull, "push": push, "save": lambda: client.save(folder / f"saved{next(saves)}")}


def torch_step() -> Callable[[], Any]:
    """Make a model of an embedding and a linear layer. Returns a function that makes a training step."""
    import torch

    import psfleet.torch as pst

    rows = torch.nn.Embedding(ROWS, DIM, sparse=True)
    layer = torch.nn.Linear(DIM, 1)
    optimizers = (torch.optim.SparseAdam(rows.parameters()), torch.optim.Adam(layer.parameters()))
    model, optimizer = pst.convert(torch.nn.Sequential(rows, layer), optimizers)
    batch = torch.arange(IDS)
    losses: list[Any] = []

    def step() -> None:
        losses.pop().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model(batch).sum())

    losses.append(model(batch).sum())
    return step


def launcher(folder: Path) -> list[dict[str, Any]]:
    """Return the calls of the launcher, which counts its own calls in a separate process."""
    script = folder / "script.py"
    script.write_text(
        "import psfleet; psfleet.connect().dense_table('w', [0.0], psfleet.optimizer.SGD())\n"
    )
    counts_file = folder / "launcher.json"
    subprocess.run(
        [sys.executable, __file__, str(script)],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, _LAUNCHED: str(counts_file)},
        cwd=folder,
        timeout=300,
    )
    stations: list[dict[str, Any]] = json.loads(counts_file.read_text())
    return stations


def count_launcher(path: Path, script: str) -> None:
    """Launch the script, and write the number of calls of each function."""
    recorder = Recorder()
    from psfleet_launch.__main__ import main as launch

    sys.argv = ["psfleet-launch", "--servers", "1", "--workers", "1", script]
    recorder.start()
    try:
        code = launch()
    finally:
        recorder.stop()
        path.write_text(json.dumps(stations_of(Counter(recorder.calls))))
    sys.exit(code)


def here(names: list[str], folder: Path, runs: int) -> dict[str, list[dict[str, Any]]]:
    """Return the calls of the operations with these names."""
    stations_by_name = {}
    recorder = Recorder()
    recorder.start()
    try:
        with fleet_here(folder) as client:
            known = operations(client, folder)
            for name in ("pull", "push", "save", "torch"):  # which makes tables, last
                if name in names and (name != "torch" or torch_missing() is None):
                    operation = torch_step() if name == "torch" else known[name]
                    recorder.measured(operation, 3)  # warm-up
                    stations_by_name[name] = stations_of(recorder.measured(operation, runs))
    finally:
        recorder.stop()
    return stations_by_name


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--stations", action="store_true", help="print the functions too")
    parser.add_argument("--only", default="pull,push,torch,save,launch", help="operations")
    options = parser.parse_args()
    names = options.only.split(",")
    report = Report("call_path", "Python calls of one operation, both ends")
    with tempfile.TemporaryDirectory() as folder:
        stations_by_name = here(names, Path(folder), 4 * options.runs + 1)
        if "launch" in names:
            stations_by_name["launch"] = launcher(Path(folder))
    if "torch" in names and (missing := torch_missing()):
        report.skipped["torch"] = missing
    measured = [name for name in names if name in stations_by_name]
    report.rows += [{"operation": name, **totals(stations_by_name[name])} for name in measured]
    if options.stations:
        for name in measured:
            report.rows += [{f"of {name}": s.pop("function"), **s} for s in stations_by_name[name]]
    finish(report, options.json)


if __name__ == "__main__":
    if path_of_counts := os.environ.pop(_LAUNCHED, ""):
        count_launcher(Path(path_of_counts), sys.argv[1])
    else:
        main()
