"""Cost of a step with a small batch: pull and push 8 ids of one table, and a dense table of 64 values.

Dim 16, Adam, tensors in shared memory. Async with one worker and 1 to 8 servers, and sync with 2 workers and
1 and 2 servers. CPU is that of servers and workers together.
"""

import contextlib
import sys
from typing import Any

import numpy as np
from measuring import Summary, in_turn
from processes import obey, psfleet_crew
from reporting import Report, arguments, finish

DIM, IDS, ROWS = 16, 8, 100_000


def work(mode: Any, group: str) -> None:
    """Run a worker.

    Args:
        mode: Consistency mode of the fleet.
        group: Number of servers that hold the table of rows, or "all".
    """
    import psfleet

    with psfleet.connect(mode=mode) as ps:
        adam = psfleet.optimizer.Adam(1e-3)
        sparse = ps.sparse_table("rows", DIM, adam, servers=None if group == "all" else int(group))
        dense = ps.dense_table("bias", np.zeros(64), adam)
        batches = np.random.default_rng(0).integers(0, ROWS, (50, IDS))
        rows, slope = np.full((IDS, DIM), 0.01, np.float32), np.full(64, 0.01, np.float32)

        def step(number: int) -> None:
            ids = batches[number % len(batches)]
            ps.pull({sparse: ids, dense: None})
            ps.push({sparse: (ids, rows), dense: slope})

        obey(step, ps.flush)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--groups", default="1,all", help="how many servers hold the table of rows")
    parser.add_argument("--servers", default="1,2,4,8", help="of the asynchronous fleets")
    options = parser.parse_args()
    report = Report("small_steps", f"Steps of {IDS} ids and 64 dense values")
    steps = options.steps or (200 if options.short else 1000)
    fleets = [("async", int(servers), 1) for servers in options.servers.split(",")]
    for mode, servers, workers in (*fleets, ("sync", 1, 2), ("sync", 2, 2)):
        with contextlib.ExitStack() as stack:
            crews = [
                stack.enter_context(
                    psfleet_crew(
                        f"rows on {group}",
                        [__file__, "--worker", mode, group],
                        servers=servers,
                        workers=workers,
                    )
                )
                for group in options.groups.split(",")
                if servers > 1 or group == "all"
            ]
            summaries = in_turn(crews, warm=100, steps=steps, runs=options.runs)
        report.rows += [
            row(f"{mode}, {servers} x {workers}", name, summary, steps * workers)
            for name, summary in summaries.items()
        ]
    finish(report, options.json)


def row(fleet: str, name: str, summary: Summary, steps: int) -> dict[str, Any]:
    return {
        "fleet": fleet,
        "contender": name,
        "CPU us / step": summary.cpu / steps * 1e6,
        "of it servers": summary.parts["servers"] / steps * 1e6,
        "steps / s": steps / summary.wall,
        "CPU spread": summary.cpu_spread,
        "others' cores": summary.others,
        "runs": summary.runs,
    }


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(*sys.argv[-2:])
    else:
        main()
