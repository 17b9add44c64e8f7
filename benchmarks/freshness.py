"""Followers: the age of the rows that they serve, and the cost of a follower for the training.

Freshness: a worker pushes rows at a steady rate, in async mode to 2 servers, and a follower in another
process records when it has each push. A row's time is measured from the acknowledgement of its push to the
follower's first version (*cut*) that contains it. Cost: W1 with and without a follower that copies the whole
table and then receives all changes. The CPU is that of servers and workers. The run takes two minutes on an
idle machine.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from measuring import paired_ratio, samples_in_turn, summarize
from processes import Crew, environment, psfleet_crew
from reporting import Report, arguments, finish

from psfleet.core.engine.kernels.id_routing import owned_by
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.serving.follower import Follower

DIM = 16
PUSH = 200  # rows
BEGAN = time.monotonic()
LEVELS = (0.5, 0.9, 0.99, 0.999, 1.0)
BATCHES = 40
ROWS = 2_000_000  # of W1's table: five times as many take five times as long to make and to copy


def say(text: str) -> None:
    """Print a progress message, with the seconds since the start."""
    print(f"{time.monotonic() - BEGAN:6.1f} s: {text}", flush=True)


def follow(endpoints: str) -> None:
    """Run a follower that prints a line for each cut: time, and last push of worker 0 on each server."""
    with Follower(endpoints.split(",")) as follower:
        cut = follower.position
        while True:
            print(json.dumps([time.monotonic(), [p[0][1] for p in cut.pushes]]), flush=True)
            cut = follower.await_cut(cut.number + 1, timeout=600.0)


@contextlib.contextmanager
def following(endpoints: tuple[str, ...]) -> Iterator["subprocess.Popen[str]"]:
    """Context with a process that follows these servers."""
    command = [sys.executable, __file__, "--follow", ",".join(endpoints)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def freshness(rows: int, rate: int) -> dict[str, Any]:
    """Measure the seconds from push to cut for `rows` rows, pushed at `rate` rows per second."""
    spec = TableSpec("rows", "sparse", (DIM,), make_rule("adam", {}))
    dice = np.random.default_rng(0)
    batches = [dice.choice(1_000_000, PUSH, replace=False) for _ in range(rows // PUSH)]
    cuts: list[tuple[float, list[int]]] = []
    with LocalFleet(servers=2, workers=1) as fleet:
        runtime = fleet.connect(0, "async")
        runtime.create(spec)
        gradient = np.full((PUSH, DIM), 0.01, np.float32)
        with following(fleet.endpoints) as process:
            assert process.stdout is not None
            cuts.append(tuple(json.loads(process.stdout.readline())))
            lines = process.stdout
            thread = threading.Thread(target=lambda: cuts.extend(map(json.loads, lines)))
            thread.start()
            acknowledged, due = [], time.monotonic()
            for ids in batches:
                time.sleep(max(due - time.monotonic(), 0.0))
                due += PUSH / rate
                runtime.push([Gradient(spec.key, gradient, ids, 1e-3)]).wait()
                acknowledged.append(time.monotonic())
            spent = acknowledged[-1] - acknowledged[0]
            while min(cuts[-1][1]) < len(batches):
                time.sleep(0.01)
        thread.join()
        runtime.close()
    times, counts = [], []
    for server in range(2):
        reached = np.array([pushes[server] for _, pushes in cuts])
        at = np.array([moment for moment, _ in cuts])
        for number, ids in enumerate(batches, 1):
            cut_time = at[np.searchsorted(reached, number)]
            times.append(max(cut_time - acknowledged[number - 1], 0.0))
            counts.append(int(owned_by(ids, server, 2).sum()))
    order = np.argsort(times)
    seconds, weights = np.array(times)[order], np.cumsum(np.array(counts)[order])
    percentiles = {
        f"p{100 * level:g} s": float(seconds[np.searchsorted(weights, level * weights[-1])])
        for level in LEVELS
    }
    edges = np.arange(0, 0.5, 0.02)
    histogram, _ = np.histogram(times, [*edges, np.inf], weights=counts)
    return {
        "rows": rows,
        "rows / s": rows / spent,
        "cuts": len(cuts),
        **percentiles,
        "histogram, steps of 20 ms": " ".join(f"{int(count):,}" for count in histogram),
    }


def main() -> None:
    if sys.argv[1:2] == ["--follow"]:
        follow(sys.argv[2])
    parser = arguments(__doc__ or "")
    parser.add_argument("--updated", type=int, default=1_000_000, help="rows of freshness")
    parser.add_argument("--rate", type=int, default=20_000, help="rows in a second")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of W1's table")
    parser.add_argument("--batches", type=int, default=BATCHES, help="of W1, all in the warm-up")
    options = parser.parse_args()
    rows = min(options.rows, 300_000) if options.short else options.rows
    updated = min(options.updated, 100_000) if options.short else options.updated
    steps = options.steps or (40 if options.short else 200)
    report = Report("freshness", f"Followers: rows of {DIM}, Adam, 2 servers, W1 of {rows:,} rows")
    say(f"{updated:,} rows are pushed, {options.rate:,} a second")
    report.rows.append(freshness(updated, options.rate))
    say(", ".join(f"{name} {value}" for name, value in report.rows[0].items()))
    with contextlib.ExitStack() as stack:
        program = ["benchmarks/w1_sparse.py", "--worker", str(rows), str(options.batches)]

        def crew(name: str) -> Crew:
            return stack.enter_context(psfleet_crew(name, program, workers=1))

        alone, followed = crew("alone"), crew("followed")
        process = stack.enter_context(following(followed.endpoints))
        assert process.stdout is not None
        say("both jobs have their tables")
        process.stdout.readline()
        say("the follower has its copy")
        threading.Thread(target=lambda: [*process.stdout], daemon=True).start()
        samples_by_crew = samples_in_turn(
            [alone, followed], warm=options.batches, steps=steps, runs=options.runs
        )
    say("all runs are over")
    for name, samples in samples_by_crew.items():
        summary = summarize(samples)
        ratio, low, high = paired_ratio(samples, samples_by_crew["alone"])
        report.rows.append(
            {
                "contender": name,
                "CPU us / step": summary.cpu / steps * 1e6,
                "ids / s": 65_536 * steps / summary.wall,
                "against alone": ratio,
                "at least": low,
                "at most": high,
                **summary.noise,
            }
        )
    finish(report, options.json)


if __name__ == "__main__":
    sys.exit(main())
