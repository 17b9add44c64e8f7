"""A step of a plain client with four tables: one call for all tables, compared with a call for each.

One worker, 2 servers, sync and async mode, and embedded. Three sparse tables of dim 16 and a dense table of
64 values, 256 ids of each per step, Adam. CPU is that of servers and worker together.
"""

import contextlib
import sys
from typing import Any

import numpy as np
from measuring import Summary, in_turn
from processes import obey, psfleet_crew
from reporting import Report, arguments, finish

DIM, IDS, ROWS = 16, 256, 100_000


def work(mode: Any, together: bool) -> None:
    """Run a worker.

    Args:
        mode: Consistency mode of the fleet, or "embedded".
        together: True to use one call for all tables.
    """
    import psfleet
    from psfleet.core.base.settings.environment import Environment

    alone = Environment(None, 0, (), 1) if mode == "embedded" else None
    with psfleet.connect(alone, mode="async" if mode == "embedded" else mode) as ps:
        adam = psfleet.optimizer.Adam(1e-3)
        sparse = [ps.sparse_table(name, DIM, adam) for name in ("users", "items", "tags")]
        dense = ps.dense_table("bias", np.zeros(64), adam)
        dice = np.random.default_rng(0)
        batches = dice.integers(0, ROWS, (50, len(sparse), IDS))
        rows, slope = np.full((IDS, DIM), 0.01, np.float32), np.full(64, 0.01, np.float32)

        def step(number: int) -> None:
            ids_by_table = dict(zip(sparse, batches[number % len(batches)], strict=True))
            ps.pull({**ids_by_table, dense: None})
            ps.push({**{table: (ids, rows) for table, ids in ids_by_table.items()}, dense: slope})

        def step_one_by_one(number: int) -> None:
            batch = batches[number % len(batches)]
            for table, ids in zip(sparse, batch, strict=True):
                table.pull(ids)
            dense.pull()
            for table, ids in zip(sparse, batch, strict=True):
                table.push(ids, rows)
            dense.push(slope)

        obey(step if together else step_one_by_one, ps.flush)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("multitable", "Four tables a step, 1 worker, 2 servers")
    with contextlib.ExitStack() as stack:
        crews = [
            stack.enter_context(
                psfleet_crew(
                    f"{mode}, {how}",
                    [__file__, "--worker", mode, how],
                    servers=1 if mode == "embedded" else 2,
                )
            )
            for mode in ("sync", "async", "embedded")
            for how in ("one call", "a call for each")
        ]
        steps = options.steps or (100 if options.short else 500)
        summaries = in_turn(crews, warm=50, steps=steps, runs=options.runs)
    report.rows += [row(name, steps, summary) for name, summary in summaries.items()]
    finish(report, options.json)


def row(name: str, steps: int, summary: Summary) -> dict[str, Any]:
    return {
        "contender": name,
        "CPU us / step": summary.cpu / steps * 1e6,
        "us / step": summary.wall / steps * 1e6,
        **summary.noise,
    }


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(sys.argv[-2], sys.argv[-1] == "one call")
    else:
        main()
