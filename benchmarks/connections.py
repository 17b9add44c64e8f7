"""How many calls one server answers with 4, 16 and 64 connections: where its Python limits, under one GIL.

Each connection is a worker's, which pulls and pushes 8 ids and 64 dense values and waits for the answer. Two
processes hold the connections, one thread for each.
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
    """So many workers, each with a connection of its own."""
    import psfleet
    from psfleet.core.base.settings.environment import read_environment

    replies = keep_output()
    base = read_environment()
    clients = [
        psfleet.connect(dataclasses.replace(base, rank=first + number), mode="async")
        for number in range(count)
    ]

    def steps(client: Client, number: int, wanted: int) -> None:
        adam = psfleet.optimizer.Adam(1e-3)
        sparse = client.sparse_table("rows", DIM, adam)
        dense = client.dense_table("bias", np.zeros(64), adam)
        dice = np.random.default_rng(first + number)
        rows, slope = np.full((IDS, DIM), 0.01, np.float32), np.full(64, 0.01, np.float32)
        for _ in range(wanted):
            ids = dice.choice(ROWS, IDS, replace=False)
            client.pull({sparse: ids, dense: None})
            client.push({sparse: (ids, rows), dense: slope})
        client.flush()

    def turn(number: int) -> None:
        threads = [
            threading.Thread(target=steps, args=(client, place, 20))
            for place, client in enumerate(clients)
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
            [found] = in_turn([subject], warm=1, steps=turns, runs=options.runs).values()
            report.rows.append(row(connections, found, turns * 20 * connections))
    finish(report, options.json)


def row(connections: int, found: Any, steps: int) -> dict[str, Any]:
    return {
        "connections": connections,
        "steps / s": steps / found.wall,
        "server's CPU us / step": found.parts["servers"] / steps * 1e6,
        "server's cores": found.parts["servers"] / found.wall,
        "workers' CPU us / step": found.parts["workers"] / steps * 1e6,
        "CPU spread": found.cpu_spread,
        "others' cores": found.others,
        "runs": found.runs,
    }


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(int(sys.argv[-2]), int(sys.argv[-1]))
    else:
        main()
