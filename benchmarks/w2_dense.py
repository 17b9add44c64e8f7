"""W2: pull and push 16 dense arrays of a million float32 per step, SGD and Adam on the servers.

GB counts both directions: 128 MB per step. The contenders take turns within one run.
"""

import argparse
import contextlib
import sys
from typing import Any

import numpy as np
from measuring import Summary, in_turn
from peers import attendance
from processes import BETWEEN_HOSTS, obey, psfleet_crew
from reporting import Report, arguments, finish

ARRAYS, LENGTH = 16, 1_000_000


def work(length: int, kind: str) -> None:
    """Run a worker of psfleet."""
    import psfleet
    from psfleet.core.engine.runtime_interface import Gradient, Read

    with psfleet.connect() as ps:
        optimizer = psfleet.optimizer.SGD(1e-3) if kind == "sgd" else psfleet.optimizer.Adam(1e-3)
        start = np.zeros(length, np.float32)
        tables = [ps.dense_table(f"w2.{i}", start, optimizer) for i in range(ARRAYS)]
        reads = [Read(table.spec.key) for table in tables]
        gradient = np.full(length, 1e-3, np.float32)
        gradients = [Gradient(table.spec.key, gradient, None, 1e-3) for table in tables]

        def step(number: int) -> None:
            ps.runtime.pull(reads)
            ps.runtime.push(gradients)

        obey(step, ps.flush)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workers", type=int, nargs="*", default=[1])
    parser.add_argument("--length", type=int, default=LENGTH, help="of an array")
    options = parser.parse_args()
    report = Report(
        "w2_dense", f"W2 dense: pull + push {ARRAYS} x {options.length:,} float32, 2 servers"
    )
    for kind in ("sgd", "adam"):
        for workers in options.workers:
            report.rows += measure(kind, workers, options, report)
    finish(report, options.json)


def measure(
    kind: str, workers: int, options: argparse.Namespace, report: Report
) -> list[dict[str, Any]]:
    """Return the lines of one optimizer and number of workers."""
    steps = options.steps or (6 if options.short else 15)
    with contextlib.ExitStack() as stack:
        program = [__file__, "--worker", str(options.length), kind]
        crews = [
            stack.enter_context(psfleet_crew("psfleet", program, workers=workers)),
            *(
                stack.enter_context(psfleet_crew(name, program, workers=workers, over=over))
                for name, over in BETWEEN_HOSTS.items()
            ),
        ]
        peers = [
            attendance.torch(f"w2-{kind}", workers),
            attendance.torch(f"w2-{kind}", workers, over_tcp=True),
            attendance.tensorflow("w2", workers, kind),
            attendance.paddle("w2", workers, kind),
        ]
        crews += attendance.enter(stack, report, options, peers)
        summaries = in_turn(crews, warm=3, steps=steps, runs=options.runs)
    moved = 2 * ARRAYS * options.length * 4 / 1e9 * steps * workers
    return [row(name, kind, workers, moved, summary) for name, summary in summaries.items()]


def row(name: str, kind: str, workers: int, moved: float, summary: Summary) -> dict[str, Any]:
    """Return a line. `moved` is the number of gigabytes in both directions."""
    return {
        "contender": name,
        "rule": kind,
        "workers": workers,
        "GB / s": moved / summary.wall,
        "CPU-s / GB": summary.cpu / moved,
        "servers": summary.parts["servers"] / moved,
        "workers' part": summary.parts["workers"] / moved,
        **summary.noise,
    }


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(int(sys.argv[2]), sys.argv[3])
    else:
        main()
