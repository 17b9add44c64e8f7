"""What the metrics of a job cost its servers and workers: W1 unwatched, and with a look every 2 s.

A look is what a launcher does for `--watch`: it asks every server, and workers send their metrics with their
beats. With `--against` another checkout takes part, such as one from before a metric was added.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import processes
from data import W1_IDS
from measuring import Summary, in_turn
from processes import Crew, psfleet_crew
from reporting import Report, arguments, finish

EVERY = 2.0  # seconds between two looks, as psfleet_launch.observability.recorder has it
BATCHES = 40


class Watched:
    """A crew that is looked at while it runs."""

    def __init__(self, crew: Crew) -> None:
        from psfleet.settings.environment import Environment
        from psfleet_launch.observability.fleet_reader import FleetReader
        from psfleet_launch.observability.job_counters import JobCounters

        self.name = crew.name
        self.processes = crew.processes
        self._crew = crew
        self._reader = FleetReader("w1", crew.endpoints, Environment(), JobCounters())

    def run(self, steps: int) -> list[dict[str, Any]]:
        """See Crew.run."""
        over = threading.Event()
        looks = threading.Thread(target=self._look, args=(over,))
        looks.start()
        try:
            return self._crew.run(steps)
        finally:
            over.set()
            looks.join()

    def _look(self, over: threading.Event) -> None:
        self._reader.read()
        while not over.wait(EVERY):
            self._reader.read()


@contextlib.contextmanager
def of_checkout(folder: Path) -> Iterator[None]:
    """Within, processes are started from another checkout."""
    before, processes.ROOT = processes.ROOT, folder
    try:
        yield
    finally:
        processes.ROOT = before


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--against", type=Path, help="another checkout, unwatched")
    options = parser.parse_args()
    rows = 2_000_000 if options.short else W1_IDS
    steps = options.steps or (200 if options.short else 800)
    report = Report("watching", f"W1 with and without metrics, 2 servers, {rows:,} rows")
    with contextlib.ExitStack() as stack:

        def crew(name: str, root: Path) -> Crew:
            program = [str(root / "benchmarks/w1_sparse.py"), "--worker", str(rows)]
            with of_checkout(root):
                entered = psfleet_crew(name, program, workers=options.workers)
                return stack.enter_context(entered)

        here = processes.ROOT
        crews: list[Any] = [crew("unwatched", here), Watched(crew("watched", here))]
        if options.against:
            crews.append(crew("the other checkout", options.against.resolve()))
        found = in_turn(crews, warm=BATCHES, steps=steps, runs=options.runs)
    report.rows = lines(found, steps * options.workers)
    finish(report, options.json)


def lines(found: dict[str, Summary], steps: int) -> Sequence[dict[str, Any]]:
    usual = found["unwatched"].cpu
    return [
        {
            "contender": name,
            "CPU us / step": one.cpu / steps * 1e6,
            "of it servers": one.parts["servers"] / steps * 1e6,
            "against unwatched": one.cpu / usual,
            **one.noise,
        }
        for name, one in found.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
