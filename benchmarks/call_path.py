"""The path of one operation through psfleet: its Python calls and source files, both ends in this process.

One server and one worker, tensors in shared memory, after a warm-up: a pull and a push of 8 ids, a step of
a torch model with two layers, a snapshot of 200 rows; and the launcher of a script of one line. Counts are
medians for each function, so that threads that work beside an operation do not count.
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
    """A profiler of all threads that counts calls of functions of psfleet."""

    def __init__(self) -> None:
        self.calls: list[CodeType] = []
        self._own: dict[CodeType, bool] = {}

    def start(self) -> None:
        """Count from now on, also in threads that begin later."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def stop(self) -> None:
        """Count no more in this thread, nor in new ones."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        own = self._own.get(code)
        if own is None:
            path = Path(code.co_filename)
            own = code.co_name != "<module>" and path.is_absolute() and _first(path) is not None
            self._own[code] = own
        if own:
            self.calls.append(code)

    def settled(self) -> None:
        """Wait until no thread calls anything any more."""
        known = -1
        while known != len(self.calls):
            known = len(self.calls)
            time.sleep(QUIET)

    def measured(self, operation: Callable[[], Any], runs: int) -> dict[CodeType, int]:
        """Calls of each function in one operation, in the order in which they come first."""
        counts: list[Counter[CodeType]] = []
        order: dict[CodeType, None] = {}
        for _ in range(runs):
            self.settled()
            self.calls.clear()
            operation()
            self.settled()
            counts.append(Counter(self.calls))
            order.update(dict.fromkeys(self.calls))
        medians = {code: int(statistics.median(one[code] for one in counts)) for code in order}
        return {code: count for code, count in medians.items() if count}


def totals(stations: list[dict[str, Any]]) -> dict[str, int]:
    """Calls, distinct functions and distinct files."""
    return {
        "calls": sum(station["calls"] for station in stations),
        "functions": len(stations),
        "files": len({station["file"] for station in stations}),
    }


def stations_of(counts: dict[CodeType, int]) -> list[dict[str, Any]]:
    """The table of an operation."""
    return [
        {"function": code.co_qualname, "file": _short(code.co_filename), "calls": count}
        for code, count in counts.items()
    ]


def _first(path: Path) -> int | None:
    """The place in a path of the package of psfleet that the file is in; None: it is in none."""
    parts = path.parts
    return max((place for place, part in enumerate(parts[:-1]) if part in PACKAGES), default=None)


def _short(path: str) -> str:
    """The path of a source file from its package on."""
    return "/".join(Path(path).parts[_first(Path(path)) :])


@contextlib.contextmanager
def fleet_here(folder: Path) -> Iterator[Any]:
    """A client of a server whose threads are in this process."""
    import psfleet
    from psfleet.core.base.settings.environment import Environment
    from psfleet_server.process import Server

    endpoint = f"unix:{folder}/server"
    with Server(Environment("server", 0, (endpoint,), 1)):
        # The client has the seat of the process, so that psfleet.torch shares it.
        os.environ.update(
            PSFLEET_ROLE="worker", PSFLEET_RANK="0", PSFLEET_SERVERS=endpoint, PSFLEET_WORKERS="1"
        )
        with psfleet.connect() as client:
            yield client


def operations(client: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """What is measured, once it is warm."""
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
    """Make a model of an embedding and a linear layer; returns its backward and step."""
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
    """The stations of the launcher, which counts its own calls in a process of its own."""
    script = folder / "script.py"
    script.write_text(
        "import psfleet; psfleet.connect().dense_table('w', [0.0], psfleet.optimizer.SGD())\n"
    )
    found = folder / "launcher.json"
    subprocess.run(
        [sys.executable, __file__, str(script)],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, _LAUNCHED: str(found)},
        cwd=folder,
        timeout=300,
    )
    stations: list[dict[str, Any]] = json.loads(found.read_text())
    return stations


def count_launcher(path: Path, script: str) -> None:
    """Launch the script, and write which functions were called how often."""
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
    """The stations of the operations with these names."""
    found = {}
    recorder = Recorder()
    recorder.start()
    try:
        with fleet_here(folder) as client:
            known = operations(client, folder)
            for name in ("pull", "push", "save", "torch"):  # which makes tables, last
                if name in names and (name != "torch" or torch_missing() is None):
                    operation = torch_step() if name == "torch" else known[name]
                    recorder.measured(operation, 3)  # warm-up
                    found[name] = stations_of(recorder.measured(operation, runs))
    finally:
        recorder.stop()
    return found


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--stations", action="store_true", help="print the functions too")
    parser.add_argument("--only", default="pull,push,torch,save,launch", help="operations")
    options = parser.parse_args()
    names = options.only.split(",")
    report = Report("call_path", "Python calls of one operation, both ends")
    with tempfile.TemporaryDirectory() as folder:
        found = here(names, Path(folder), 4 * options.runs + 1)
        if "launch" in names:
            found["launch"] = launcher(Path(folder))
    if "torch" in names and (missing := torch_missing()):
        report.skipped["torch"] = missing
    measured = [name for name in names if name in found]
    report.rows += [{"operation": name, **totals(found[name])} for name in measured]
    if options.stations:
        for name in measured:
            report.rows += [{f"of {name}": s.pop("function"), **s} for s in found[name]]
    finish(report, options.json)


if __name__ == "__main__":
    if path_of_counts := os.environ.pop(_LAUNCHED, ""):
        count_launcher(Path(path_of_counts), sys.argv[1])
    else:
        main()
