"""Costs of the consistency modes on one small job: CPU seconds of workers and servers, calls and staleness.

    python benchmarks/modes.py [--steps 200] [--repeats 3]

Two servers, two workers (threads of this process), a table of 20,000 ids and 64 dense weights, and the same
samples in every mode. CPU seconds are comparable on a busy machine, wall-clock time is not. A mode in which
workers wait costs wall-clock time that does not show here.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from click_model import ClicksWorkload
from measuring import quantile

from psfleet.core.runtime.modes.switch import ModeSwitchRuntime, connect
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from tests.trainings import in_threads  # noqa: E402 - found by the line before

MODES = {
    "sync": ConsistencySettings("sync"),
    "async": ConsistencySettings("async"),
    "ssp, staleness 0": ConsistencySettings("ssp", staleness=0),
    "ssp, staleness 2": ConsistencySettings("ssp", staleness=2),
    "geo, k_steps 10": ConsistencySettings("geo", k_steps=10),
    "half-async": ConsistencySettings("half-async"),
}
WORKERS = 2


@dataclass(frozen=True)
class Figures:
    """Figures of one run.

    Attributes:
        worker, server: CPU seconds of all workers and of all servers.
        pushes: Number of pushes at the busiest server.
        megabytes: Data that all servers have received and sent, in MB.
        staleness: Staleness that 99 % of pushes did not exceed, or None in a mode with rounds.
        loss: Loss on samples that were not trained on.
    """

    worker: float
    server: float
    pushes: int
    megabytes: float
    staleness: int | None
    loss: float


def measure(job: ClicksWorkload, consistency: ConsistencySettings) -> Figures:
    """Train once."""
    figures: list[Figures] = []

    def incarnation(fleet: LocalFleet, worker: int) -> None:
        runtime = connect(fleet.environment(worker), consistency)
        job.create(runtime)
        runtime.barrier()
        at_start = cpu(runtime)
        job.train(runtime)
        if worker == 0:
            figures.append(figures_of(job, runtime, at_start))
        runtime.barrier()
        runtime.close()

    with LocalFleet(2, WORKERS) as fleet:
        in_threads([partial(incarnation, fleet, worker) for worker in range(WORKERS)])
    return figures[0]


def cpu(runtime: ModeSwitchRuntime) -> tuple[float, float]:
    """Return the CPU seconds so far of this process, and of the servers."""
    return time.process_time(), sum(server["cpu_seconds"] for server in runtime.stats())


def figures_of(
    job: ClicksWorkload, runtime: ModeSwitchRuntime, before: tuple[float, float]
) -> Figures:
    """Return the figures since the moment at which `cpu` returned `before`."""
    worker, server = (now - then for now, then in zip(cpu(runtime), before, strict=True))
    stats = runtime.stats()
    return Figures(
        worker,
        server,
        max(status["pushes"] for status in stats),
        sum(status["bytes_in"] + status["bytes_out"] for status in stats) / 1e6,
        quantile((status["staleness"] for status in stats), 0.99),
        job.log_loss(runtime),
    )


def main() -> None:
    """Print a table of medians. The repeats alternate between the modes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    job = ClicksWorkload(steps=options.steps, batch=512, items=20_000, fields=26, numbers=64)
    runs: dict[str, list[Figures]] = {name: [] for name in MODES}
    for consistency in (MODES["async"], MODES["geo, k_steps 10"]):  # kernels are loaded
        measure(dataclasses.replace(job, steps=2), consistency)
    for _ in range(options.repeats):
        for name, consistency in MODES.items():
            runs[name].append(measure(job, consistency))
    heads = ["mode", "samples per CPU second", "CPU of workers, s", "of servers, s", "pushes"]
    heads += ["MB", "staleness p99", "log loss"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name, figures in runs.items():
        middle = sorted(figures, key=lambda run: run.worker + run.server)[len(figures) // 2]
        rate = statistics.median(
            WORKERS * job.steps * job.batch / (run.worker + run.server) for run in figures
        )
        stale = "-" if middle.staleness is None else middle.staleness
        print(
            f"| {name} | {rate:,.0f} | {middle.worker:.2f} | {middle.server:.2f} | {middle.pushes:,} "
            f"| {middle.megabytes:,.0f} | {stale} | {middle.loss:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
