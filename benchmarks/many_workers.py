"""Cost of each operation of a fleet for its servers with 100, 300 and 1,000 workers.

A few processes hold all workers. Each worker has its own connections. CPU is that of both servers. An
operation whose cost grows with the square of the workers shows here.
"""

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measuring import cpu_seconds
from processes import Crew, keep_output, many_workers, obey
from reporting import Report, arguments, finish

from psfleet.core.client import Client
from psfleet.fleet.testing.local_fleet import LocalFleet

SERVERS, PROCESSES, DIM, IDS, IDLE = 2, 4, 16, 8, 5.0
PARTS = ("join", "barrier", "sum of 100,000", "first step", "step", "idle second", "one comes back")
"""Operations in the order in which the workers run them."""


def work(first: int, count: int) -> None:
    """Run `count` workers. Each line of input makes all workers run the next operation."""
    import psfleet
    from psfleet.core.base.settings.environment import read_environment

    replies = keep_output()
    base = read_environment()
    ranks = range(first, first + count)
    clients: dict[int, Client] = {}
    threading.stack_size(1 << 20)

    def connect(rank: int) -> None:
        clients[rank] = psfleet.connect(dataclasses.replace(base, rank=rank), mode="async")

    def all_reduce(rank: int) -> None:
        clients[rank].runtime.all_reduce(np.ones(100_000, np.float32), "sum")

    def step(rank: int) -> None:
        client = clients[rank]
        table = client.sparse_table("rows", DIM, psfleet.optimizer.Adam(1e-3))
        ids = np.arange(rank * IDS, (rank + 1) * IDS)
        client.pull({table: ids})
        client.push({table: (ids, np.ones((IDS, DIM), np.float32))})
        client.flush()

    def come_back(rank: int) -> None:
        if rank == 0:
            clients[0].close()
            connect(0)

    parts: list[Callable[[int], object]] = [
        connect,
        lambda rank: clients[rank].barrier(),
        all_reduce,
        step,
        step,
        lambda rank: time.sleep(IDLE),
        come_back,
    ]

    def together(number: int) -> None:
        threads = [threading.Thread(target=parts[number], args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    obey(together, replies=replies)


def measured(workers: int) -> list[dict[str, Any]]:
    """Return one row for each operation."""
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(LocalFleet(SERVERS, workers))
        crew = many_workers(stack, __file__, workers, PROCESSES, fleet.endpoints)
        servers = [process.pid for process in fleet.processes]
        subject, rows = Crew("fleet", servers, crew), []
        for part in PARTS:
            began, before = time.monotonic(), cpu_seconds(servers)
            subject.run(1)
            per = IDLE if part.startswith("idle") else 1.0
            cpu = (cpu_seconds(servers) - before) / per
            rows.append(
                {
                    "workers": workers,
                    "part": part,
                    "servers' CPU ms": cpu * 1e3,
                    "of it for each worker": cpu * 1e3 / workers,
                    "wall s": (time.monotonic() - began) / per,
                    "server 0's threads": len(list(Path(f"/proc/{servers[0]}/task").iterdir())),
                }
            )
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workers", default="100,300,1000")
    options = parser.parse_args()
    report = Report("many_workers", f"CPU of {SERVERS} servers by number of workers")
    for workers in map(int, options.workers.split(",")):
        report.rows += measured(workers)
    finish(report, options.json)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(int(sys.argv[-2]), int(sys.argv[-1]))
    else:
        main()
