"""W1: pull and push 65,536 Zipf ids per step of one sparse table, dim 16, Adam on the servers.

The contenders take turns within one run. "ids" are raw ids of the batch (about 26,000 are distinct). CPU is
that of all servers and workers. The warm-up uses every batch once, so that all rows exist in the measured
steps.
"""

import contextlib
import sys
import tempfile
from typing import Any

import numpy as np
from data import W1_BATCH, W1_IDS, Ids, batches_w1
from measuring import Summary, in_turn
from peers import attendance
from processes import BETWEEN_HOSTS, obey, psfleet_crew
from reporting import Report, arguments, finish

DIM = 16
BATCHES = 40


def work(rank: int, rows: int, ahead: bool, batches: list[Ids]) -> None:
    """Run a worker of psfleet. With `ahead` it reads the rows of the next batch during the present step."""
    import psfleet

    with psfleet.connect() as ps:
        table = ps.sparse_table("w1", DIM, psfleet.optimizer.Adam(1e-3, lazy_mode=True))
        fill(ps, table, rank, rows)
        gradient = np.full((len(batches[0]), DIM), 0.01, np.float32)

        def step(number: int) -> None:
            ids = batches[number % len(batches)]
            table.pull(ids)
            table.push(ids, gradient)

        coming = [table.pull_ahead(batches[0])] if ahead else []

        def step_ahead(number: int) -> None:
            following = table.pull_ahead(batches[(number + 1) % len(batches)])
            coming.pop().wait()
            coming.append(following)
            table.push(batches[number % len(batches)], gradient)

        obey(step_ahead if ahead else step, ps.flush)


def fill(ps: Any, table: Any, rank: int, rows: int) -> None:
    """Fill the table to the size of a table in use: rows for ids 0 to `rows` - 1."""
    count = 1 << 17
    for start in range(rank * count, rows, ps.worker_num * count):
        ids = np.arange(start, min(start + count, rows), dtype=np.int64)
        table.push(ids, np.zeros((len(ids), DIM), np.float32)).wait()
    ps.barrier()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, default=W1_IDS, help="rows of the table before the run")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument(
        "--batches", type=int, default=BATCHES, help="the warm-up sees each of them once"
    )
    parser.add_argument(
        "--durability",
        choices=["none", "log", "log+fsync"],
        default="none",
        help="one more contender, whose servers keep a log in the folder for temporary files",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        choices=[0, 1],
        default=0,
        help="1: one more contender, whose servers have standbys",
    )
    options = parser.parse_args()
    rows = min(options.rows, 2_000_000) if options.short else options.rows
    report = Report(
        "w1_sparse",
        f"W1 sparse: pull + push, {W1_BATCH:,} raw ids a step, dim {DIM}, "
        f"Adam, 2 servers, {rows:,} rows",
    )
    for workers in options.workers:
        with contextlib.ExitStack() as stack:
            program = [__file__, "--worker", str(rows), str(options.batches)]
            crews = [
                stack.enter_context(psfleet_crew("psfleet", program, workers=workers)),
                stack.enter_context(
                    psfleet_crew("psfleet, one push behind", [*program, "ahead"], workers=workers)
                ),
                *(
                    stack.enter_context(psfleet_crew(name, program, workers=workers, over=over))
                    for name, over in BETWEEN_HOSTS.items()
                ),
            ]
            if options.durability != "none":
                log_folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="psfleet-log-"))
                variables = {
                    "PSFLEET_DURABILITY": options.durability,
                    "PSFLEET_LOG_FOLDER": log_folder,
                }
                name = f"psfleet, durability {options.durability}"
                crews.append(
                    stack.enter_context(
                        psfleet_crew(name, program, workers=workers, variables=variables)
                    )
                )
            if options.replicas:
                name = "psfleet, with standbys"
                crews.append(
                    stack.enter_context(psfleet_crew(name, program, workers=workers, standbys=True))
                )
            peers = [
                attendance.torch("w1", workers),
                attendance.tensorflow(
                    "w1", workers, "adagrad"
                ),  # its Adam touches all rows in each step
                attendance.paddle("w1", workers, "adam", rows),
            ]
            crews += attendance.enter(stack, report, options, peers)
            steps = options.steps or (30 if options.short else 60)
            summaries = in_turn(crews, warm=options.batches, steps=steps, runs=options.runs)
        report.rows += [row(name, workers, steps, summary) for name, summary in summaries.items()]
    finish(report, options.json)


def row(name: str, workers: int, steps: int, summary: Summary) -> dict[str, Any]:
    ids = W1_BATCH * steps * workers
    return {
        "contender": name,
        "workers": workers,
        "M ids / CPU-s": ids / summary.cpu / 1e6,
        "M ids / s": ids / summary.wall / 1e6,
        "CPU us / step": summary.cpu / steps / workers * 1e6,
        "servers": summary.parts["servers"] / steps / workers * 1e6,
        "workers' part": summary.parts["workers"] / steps / workers * 1e6,
        "standbys": summary.parts.get("standbys", 0.0) / steps / workers * 1e6,
        **summary.noise,
    }


if __name__ == "__main__":
    if "--worker" in sys.argv:
        from psfleet.core.base.settings.environment import read_environment

        rank = read_environment().rank
        rows, count = map(int, sys.argv[2:4])
        work(rank, rows, sys.argv[-1] == "ahead", batches_w1(count, 10 + rank))
    else:
        main()
