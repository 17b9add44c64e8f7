"""Trains in small steps until there is a file `stop`; worker 0 makes trouble when a file asks for it."""

import time
from pathlib import Path

import numpy as np

import psfleet
from psfleet import fleet
from psfleet.core.client import DenseTable

WIDTH = 64  # of the rows that fill the memory
ROW = WIDTH * 12 + 34  # bytes of one: weights, two slots of Adam and the index
LARGE = 1 << 20  # elements of a gradient
MANY = 40  # such gradients: 160 MiB


class FaultTrigger:
    """What worker 0 does when there is a file with the name of a method."""

    def __init__(self, ps: psfleet.Client, bias: DenseTable) -> None:
        self._ps = ps
        self._bias = bias
        self._done: set[str] = set()

    def look(self) -> None:
        """Do what is asked for, once."""
        for order in (self.nan, self.large, self.fill):
            if order.__name__ not in self._done and Path(order.__name__).exists():
                self._done.add(order.__name__)
                order()

    def nan(self) -> None:
        """Push a gradient that is not finite."""
        self._bias.push(np.full(1000, np.nan))

    def large(self) -> None:
        """Push large gradients."""
        sgd = psfleet.optimizer.SGD(0.01)
        table = self._ps.dense_table("large", np.zeros(LARGE), optimizer=sgd)
        for _ in range(MANY):
            table.push(np.ones(LARGE)).wait()

    def fill(self) -> None:
        """Push as many rows as the file says."""
        table = self._ps.sparse_table("rows", WIDTH, optimizer=psfleet.optimizer.Adam(0.01))
        for ids in np.array_split(np.arange(int(Path("fill").read_text())), 20):
            table.push(ids, np.ones((len(ids), WIDTH), np.float32)).wait()


def main() -> None:
    """Train a dense table, which lies on one server."""
    fleet.init()
    with psfleet.connect(mode="async") as ps:
        bias = ps.dense_table("bias", np.zeros(1000), optimizer=psfleet.optimizer.SGD(0.01))
        trigger = FaultTrigger(ps, bias)
        while not Path("stop").exists():
            bias.push(np.ones(1000)).wait()
            time.sleep(0.05)
            if fleet.worker_index() == 0:
                trigger.look()


if __name__ == "__main__":
    main()
