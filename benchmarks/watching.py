"""Cost of a job's metrics for its servers and workers: W1 unwatched, and with a look every 2 s.

A look is one reading of all metrics, as a launcher does for `--watch`: every server is asked, and workers
send their metrics with their heartbeats. With `--against` another checkout takes part, such as one from
before a metric was added. Many short runs alternate. A ratio is the median of the ratios of all rounds, with
its 95 % confidence interval.

The cost of looks is less than the noise of such runs. So a second measurement lets both crews make one step
per second, and reads the metrics of one crew in each: the difference is the cost of the looks, without the
cost of the launcher.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
from data import W1_IDS
from measuring import Sample, cpu_seconds, paired_ratio, samples_in_turn, summarize
from processes import Crew, psfleet_crew
from reporting import Report, arguments, finish

EVERY = 2.0  # seconds between two looks, as psfleet_launch.observability.fleet_reader has it
BATCHES = 40


class Watched:
    """Crew whose metrics are read while it runs."""

    def __init__(self, crew: Crew) -> None:
        from psfleet.core.base.settings.environment import Environment
        from psfleet_launch.observability.fleet_reader import FleetReader

        self.name = crew.name
        self.processes = crew.processes
        self.crew = crew
        self._reader = FleetReader("w1", crew.endpoints, Environment())
        self._wait = 0.0  # of the crew's own time until the next look

    def run(self, steps: int) -> list[dict[str, Any]]:
        over = threading.Event()
        looks = threading.Thread(target=self._look_until, args=(over,))
        looks.start()
        try:
            return self.crew.run(steps)
        finally:
            over.set()
            looks.join()

    def look(self) -> None:
        """Read the metrics once."""
        self._reader.read()

    def _look_until(self, over: threading.Event) -> None:
        due = time.monotonic() + self._wait
        while not over.wait(max(due - time.monotonic(), 0.0)):
            self.look()
            due += EVERY
        self._wait = due - time.monotonic()


@contextlib.contextmanager
def of_checkout(folder: Path) -> Iterator[None]:
    """Context in which processes are started from another checkout."""
    before, processes.ROOT = processes.ROOT, folder
    try:
        yield
    finally:
        processes.ROOT = before


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--against", type=Path, help="another checkout, unwatched")
    parser.add_argument("--rows", type=int, default=W1_IDS, help="rows of the table before the run")
    parser.add_argument(
        "--batches", type=int, default=BATCHES, help="the warm-up sees each of them once"
    )
    parser.add_argument("--looks", type=int, default=60, help="steps with a look, one a second")
    options = parser.parse_args()
    rows = min(options.rows, 2_000_000) if options.short else options.rows
    steps = options.steps or (200 if options.short else 800)
    report = Report("watching", f"W1 with and without metrics, 2 servers, {rows:,} rows")
    with contextlib.ExitStack() as stack:

        def crew(name: str, root: Path) -> Crew:
            script = str(root / "benchmarks/w1_sparse.py")
            program = [script, "--worker", str(rows), str(options.batches)]
            with of_checkout(root):
                entered = psfleet_crew(name, program, workers=options.workers)
                return stack.enter_context(entered)

        here = processes.ROOT
        crews: list[Any] = [crew("unwatched", here), Watched(crew("watched", here))]
        if options.against:
            crews.append(crew("the other checkout", options.against.resolve()))
        samples_by_crew = samples_in_turn(
            crews, warm=options.batches, steps=steps, runs=options.runs
        )
        looks = cost_of_looks(crews[0], crews[1], options.looks)
    usual = summarize(samples_by_crew["unwatched"])
    for group, seconds in looks.items():
        rate = usual.parts[group] / usual.wall
        line = {"a look at": group, "CPU ms": seconds * 1e3, "of W1's CPU": seconds / EVERY / rate}
        report.rows.append(line)
    report.rows += lines(samples_by_crew, steps * options.workers)
    finish(report, options.json)


def cost_of_looks(unwatched: Any, watched: Any, seconds: int) -> dict[str, float]:
    """Return the CPU seconds of a look for each group of processes, with one look per second."""
    before = [_cpu(crew) for crew in (unwatched, watched)]
    for _ in range(seconds):
        began = time.monotonic()
        unwatched.run(1)
        watched.crew.run(1)
        watched.look()
        time.sleep(max(began + 1 - time.monotonic(), 0.0))
    without, looked_at = (
        {group: cpu - was[group] for group, cpu in _cpu(crew).items()}
        for crew, was in zip((unwatched, watched), before, strict=True)
    )
    return {group: (looked_at[group] - without[group]) / seconds for group in without}


def _cpu(crew: Any) -> dict[str, float]:
    return {group: cpu_seconds(pids) for group, pids in crew.processes().items()}


def lines(samples_by_crew: dict[str, list[Sample]], steps: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each contender."""
    for name, samples in samples_by_crew.items():
        summary = summarize(samples)
        ratio, low, high = paired_ratio(samples, samples_by_crew["unwatched"])
        yield {
            "contender": name,
            "CPU us / step": summary.cpu / steps * 1e6,
            "of it servers": summary.parts["servers"] / steps * 1e6,
            "against unwatched": ratio,
            "at least": low,
            "at most": high,
            **summary.noise,
        }


if __name__ == "__main__":
    sys.exit(main())
