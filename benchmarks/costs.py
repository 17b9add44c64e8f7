"""Costs of a call, an id and a byte: the figures that docs/scaling.md uses.

One worker, 2 servers, async, tables of 2 M rows. Every cost is CPU time of worker and servers together,
computed from the difference between runs of two sizes. An "id" is one distinct id of a step, pulled and
pushed: dim 16, Adam.
"""

import contextlib
import sys
from typing import Any

import numpy as np
from measuring import Summary, in_turn
from processes import Connection, obey, psfleet_crew
from reporting import Report, arguments, finish

DIM, ROWS, LENGTH = 16, 2_000_000, 4_000_000
SMALL, LARGE = 16, 32_768


def work(kind: str, size: int) -> None:
    """Run a worker that pulls and pushes `size` distinct ids, or values of a dense table, in each step."""
    import psfleet

    with psfleet.connect() as ps:
        if kind == "dense":
            dense = ps.dense_table("dense", np.zeros(size, np.float32), psfleet.optimizer.SGD(0.1))
            gradient = np.ones(size, np.float32)
            obey(lambda _: (dense.pull(), dense.push(gradient)), ps.flush)
            return
        table = ps.sparse_table("rows", DIM, psfleet.optimizer.Adam(1e-3))
        for start in range(0, ROWS, 1 << 17):
            ids = np.arange(start, min(start + (1 << 17), ROWS), dtype=np.int64)
            table.push(ids, np.zeros((len(ids), DIM), np.float32)).wait()
        batches = (
            np.random.default_rng(0).permutation(ROWS)[: size * (ROWS // LARGE)].reshape(-1, size)
        )
        rows = np.full((size, DIM), 0.01, np.float32)

        def step(number: int) -> None:
            ids = batches[number % len(batches)]
            table.pull(ids)
            table.push(ids, rows)

        obey(step, ps.flush)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("costs", "Costs: CPU of worker and servers together, 1 worker, 2 servers")
    for name, over in (
        ("shared memory", Connection.MEMORY),
        ("messages over TCP", Connection.TCP),
        ("messages over TLS", Connection.TLS),
    ):
        cases = [("sparse", SMALL), ("sparse", LARGE), ("dense", 16), ("dense", LENGTH)]
        with contextlib.ExitStack() as stack:
            crews = [
                stack.enter_context(
                    psfleet_crew(
                        f"{kind} {size}", [__file__, "--worker", kind, str(size)], over=over
                    )
                )
                for kind, size in cases
            ]
            steps = options.steps or 30
            summaries = in_turn(crews, warm=10, steps=steps, runs=options.runs)
        report.rows.append(row(name, summaries, steps))
    finish(report, options.json)


def row(name: str, summaries: dict[str, Summary], steps: int) -> dict[str, Any]:
    call, ids, small, large = (
        summaries[key].cpu / steps * 1e6
        for key in (f"sparse {SMALL}", f"sparse {LARGE}", "dense 16", f"dense {LENGTH}")
    )
    servers = [
        summaries[key].parts["servers"] / steps * 1e6
        for key in (f"sparse {SMALL}", f"sparse {LARGE}")
    ]
    return {
        "way": name,
        "us / call": call / 2,
        "of it server": servers[0] / 2,
        "ns / id": (ids - call) / LARGE * 1e3,
        "of it server ": (servers[1] - servers[0]) / LARGE * 1e3,
        "dense CPU-s / GB": (large - small) / (LENGTH * 8) * 1e3,
        "others' cores": max(summary.others for summary in summaries.values()),
    }


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(sys.argv[-2], int(sys.argv[-1]))
    else:
        main()
