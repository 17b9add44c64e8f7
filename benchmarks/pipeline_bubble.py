"""Idle time (bubble) of each pipeline schedule, measured in real stage processes, compared with its formula.

The pieces of work only sleep, so that two cores can run any number of stages. Begin and end of each sleep are
recorded on the machine's monotonic clock. The bubble is the fraction of the stages' time, from the first
sleep of a step to the last, in which they do not sleep. It includes messages, wake-ups and the engine's own
work.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from processes import environment
from reporting import Report, arguments, finish

from psfleet.core.graph.program.operation import Array, Context, Op, Spec
from psfleet.core.graph.program.variable import Variable

SCHEDULES = ("gpipe", "1f1b")
STEPS = 5
naps: list[tuple[float, float]] = []


@dataclass(frozen=True)
class Nap(Op):
    """Computes x + w after a sleep. Each gradient takes a sleep too."""

    seconds: float

    def infer(self, x: Variable, w: Variable) -> Spec:
        return x.shape, x.dtype

    def forward(self, context: Context, x: Array, w: Array) -> Array:
        nap(self.seconds)
        return x + w

    def backward(self, context: Context, gradient: Array) -> Any:
        nap(self.seconds * sum(context.needs))
        return gradient, gradient.sum(axis=0)


def nap(seconds: float) -> None:
    """Sleep, and record when."""
    begin = time.monotonic()
    time.sleep(seconds)
    naps.append((begin, time.monotonic()))


def work(stages: int, micro: int, seconds: float, steps: int, out: Path) -> None:
    """Run the process of a stage: make steps, and write the sleeps of each."""
    import psfleet as ps
    from psfleet import fleet, layers, optimizer
    from psfleet.core.base.settings.environment import read_environment
    from psfleet.core.graph.program.variable import apply

    fleet.init()
    value = layers.data("x", [None, 1000]) + layers.create_parameter([1000], name="start")
    cuts = []
    for i in range(stages):
        value = apply(Nap(seconds), value, layers.create_parameter([1000], name=f"w{i}"))
        cuts.append([value])
    loss = layers.mean(value)
    chosen = optimizer.PipelineOptimizer(optimizer.SGD(0.01), [*cuts[:-1], [loss]])
    fleet.distributed_optimizer(chosen).minimize(loss)
    executor, feed = ps.Executor(), {"x": np.zeros((8 * micro, 1000), np.float32)}
    by_step = []
    for _ in range(steps + 1):  # the first one connects
        naps.clear()
        executor.run(feed=feed)
        by_step.append(list(naps))
    (out / f"{read_environment().stage}.json").write_text(json.dumps(by_step[1:]))


def measure(kind: str, stages: int, micro: int, seconds: float, steps: int) -> list[float]:
    """Return the bubble of each step of a job."""
    with tempfile.TemporaryDirectory() as folder:
        job = [sys.executable, "-m", "psfleet_launch", "--no-progress", "--log-dir", folder]
        job += ["--pipeline", kind, "--stages", str(stages), "--micro-batches", str(micro)]
        worker_arguments = ["--worker", "--stages", str(stages), "--micro-batches", str(micro)]
        worker_arguments += ["--seconds", str(seconds), "--steps", str(steps), "--out", folder]
        subprocess.run([*job, __file__, *worker_arguments], env=environment(), check=True)
        reports = [json.loads(Path(folder, f"{s}.json").read_text()) for s in range(stages)]
    return [_bubble([of_stage[step] for of_stage in reports]) for step in range(steps)]


def _bubble(spans: list[list[list[float]]]) -> float:
    flat = [span for of_stage in spans for span in of_stage]
    length = max(end for _, end in flat) - min(begin for begin, _ in flat)
    return 1 - sum(end - begin for begin, end in flat) / (len(spans) * length)


def line(kind: str, stages: int, micro: int, bubbles: list[float]) -> dict[str, Any]:
    """Return a line of the report."""
    theory, median = (stages - 1) / (micro + stages - 1), statistics.median(bubbles)
    return {
        "schedule": f"{kind}, {stages} stages, {micro} micro-batches",
        "formula": round(theory, 4),
        "measured (median)": round(median, 4),
        "least": round(min(bubbles), 4),
        "off": f"{median / theory - 1:+.1%}",
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.05, help="of a forward piece's nap")
    parser.add_argument("--schedules", nargs="*", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = options.steps or (2 if options.short else STEPS)
    shape = options.stages, options.micro_batches
    if options.worker:
        work(*shape, options.seconds, steps, options.out)
        return
    report = Report(
        "pipeline_bubble",
        f"Bubble of pipelines whose pieces nap {options.seconds * 1e3:g} ms, in stage processes",
    )
    for kind in options.schedules:
        bubbles = [
            x for _ in range(options.runs) for x in measure(kind, *shape, options.seconds, steps)
        ]
        report.rows.append(line(kind, *shape, bubbles))
    finish(report, options.json)


if __name__ == "__main__":
    main()
