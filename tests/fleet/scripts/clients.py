"""Plain tables beside the fleet: clients.py OUT FOLDER MODE STEPS... ; see test_clients.py."""

import sys

import numpy as np

import psfleet
from psfleet import fleet
from psfleet.optimizer import Adam, Ftrl

IDS = np.arange(64) * 2**40 - 7


def main(out: str, folder: str, what: str) -> None:
    """One worker: ten steps, of which five come from a checkpoint where `what` says so."""
    if "init" in what:
        fleet.init()
    with psfleet.connect() as ps:
        rows = ps.sparse_table("rows", dim=4, optimizer=Adam(0.05))
        bias = ps.dense_table("bias", np.zeros(3), optimizer=Ftrl(0.1))

        def steps(first: int, last: int) -> None:
            for step in range(first, last):
                numbers = np.random.default_rng((step, ps.worker_index))
                rows.push(numbers.choice(IDS, 32), numbers.normal(size=(32, 4)))
                bias.push(numbers.normal(size=3))
            ps.flush()
            ps.barrier()

        if "load" in what:
            ps.load(folder)
        else:
            steps(0, 5)
            if "init" in what:
                fleet.save_persistables(folder)
            else:
                ps.save(folder)
        if "go on" in what:
            steps(5, 10)
        if ps.worker_index == 0:
            np.savez(out, rows=rows.pull(IDS), bias=bias.pull())
        ps.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:4])
