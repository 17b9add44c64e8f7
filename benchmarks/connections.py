"""Calls per second at one server with 4, 16 and 64 connections: the limit of Python under one GIL.

Each connection belongs to a worker, which pulls and pushes 8 ids and 64 dense values and waits for the reply.
Two processes hold the connections, with one thread for each.
"""

import contextlib
import dataclasses
import sys
import threading
from typing import Any

import numpy as np
from measuring import in_turn
from processes import Crew, keep_output, many_workers, obey
from reporting import Report, arguments, finish

from psfleet.core.client import Client
from psfleet.fleet.testing.local_fleet import LocalFleet

DIM, IDS, ROWS, PROCESSES = 16, 8, 100_000, 2


def work(first: int, count: int) -> None:
    """Run `count` workers, each with its own connection."""
    import psfleet
    from psfleet.core.base.settings.environment import read_environment

    replies = keep_output()
    base = read_environment()
    clients = [
        psfleet.connect(dataclasses.replace(base, rank=first + number), mode="async")
        for number in range(count)
    ]

    def steps(client: Client, number: int, step_count: int) -> None:
        adam = psfleet.optimizer.Adam(1e-3)
        sparse = client.sparse_table("rows", DIM, adam)
        dense = client.dense_table("bias", np.zeros(64), adam)
        dice = np.random.default_rng(first + number)
        rows, slope = np.full((IDS, DIM), 0.01, np.float32), np.full(64, 0.01, np.float32)
        for _ in range(step_count):
            ids = dice.choice(ROWS, IDS, replace=False)
            client.pull({sparse: ids, dense: None})
            client.push({sparse: (ids, rows), dense: slope})
        client.flush()

    def turn(number: int) -> None:
        threads = [
            threading.Thread(target=steps, args=(client, index, 20))
            for index, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    obey(turn, replies=replies)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--connections", default="4,16,64")
    options = parser.parse_args()
    report = Report("connections", "Steps of 8 ids and 64 dense values at one server")
    for connections in map(int, options.connections.split(",")):
        with contextlib.ExitStack() as stack:
            fleet = stack.enter_context(LocalFleet(1, connections))
            crew = many_workers(stack, __file__, connections, PROCESSES, fleet.endpoints)
            subject = Crew("one server", [fleet.processes[0].pid], crew)
            turns = max((options.steps or 3200) // (20 * connections), 1)
            [summary] = in_turn([subject], warm=1, steps=turns, runs=options.runs).values()
            report.rows.append(row(connections, summary, turns * 20 * connections))
    finish(report, options.json)


def row(connections: int, summary: Any, steps: int) -> dict[str, Any]:
    return {
        "connections": connections,
        "steps / s": steps / summary.wall,
        "server's CPU us / step": summary.parts["servers"] / steps * 1e6,
        "server's cores": summary.parts["servers"] / summary.wall,
        "workers' CPU us / step": summary.parts["workers"] / steps * 1e6,
        "CPU spread": summary.cpu_spread,
        "others' cores": summary.others,
        "runs": summary.runs,
    }


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(int(sys.argv[-2]), int(sys.argv[-1]))
    else:
        main()
