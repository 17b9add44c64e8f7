"""A small model that learns something: clicks on items, told from ids and numbers.

Its logit is the sum of one weight for each of a sample's ids and of a linear part of its numbers. Data
come from a model of the same form, so that how well it is learned can be measured.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class ClicksWorkload:
    """Adam on the dense part, Adagrad on the rows.

    Attributes:
        steps: Of each worker.
        batch: Samples of a step.
        items: Different ids.
        fields: Ids of a sample.
        numbers: Numbers of a sample.
        name: Of its tables, so that several models can be on one fleet.
    """

    steps: int = 150
    batch: int = 64
    items: int = 300
    fields: int = 4
    numbers: int = 16
    name: str = "clicks"

    @property
    def dense(self) -> TableSpec:
        """The weights of the numbers."""
        return TableSpec(f"{self.name}/numbers", "dense", (self.numbers,), make_rule("adam", {}))

    @property
    def rows(self) -> TableSpec:
        """One weight for each id."""
        return TableSpec(
            f"{self.name}/items",
            "sparse",
            (1,),
            make_rule("adagrad", {}),
            initializer=InitializerSpec("constant", 0.0),
        )

    @functools.cached_property
    def _truth(self) -> tuple[Floats, Floats]:
        """The weights that the data come from, of items and of numbers."""
        dice = np.random.default_rng(5)
        slope = dice.normal(size=self.numbers) / np.sqrt(self.numbers)
        return dice.normal(size=self.items).astype(np.float32), slope.astype(np.float32)

    def samples(self, dice: np.random.Generator, count: int) -> tuple[Ids, Floats, Floats]:
        """Ids [count, fields], numbers [count, numbers] and clicks [count]."""
        items, slope = self._truth
        ids = dice.integers(0, self.items, (count, self.fields))
        numbers = dice.normal(size=(count, self.numbers)).astype(np.float32)
        logit = items[ids].sum(axis=1) + numbers @ slope
        clicks = dice.random(count) < 1 / (1 + np.exp(-logit))
        return ids, numbers, clicks.astype(np.float32)

    def create(self, runtime: Runtime) -> None:
        """Make the tables."""
        runtime.create(self.dense, np.zeros(self.numbers, np.float32))
        runtime.create(self.rows)

    def train(self, runtime: Runtime, seed: int = 0) -> None:
        """One worker's steps, and a collective after them."""
        dice = np.random.default_rng((seed, runtime.worker_index))
        for _ in range(self.steps):
            ids, numbers, clicks = self.samples(dice, self.batch)
            weights, rows = runtime.pull([Read(self.dense.key), Read(self.rows.key, ids)])
            wrong = (_chance(weights, rows, numbers) - clicks) / np.float32(self.batch)
            each = np.repeat(wrong, self.fields)[:, None]
            runtime.push(
                [
                    Gradient(self.dense.key, numbers.T @ wrong, None, 0.05),
                    Gradient(self.rows.key, each, ids.reshape(-1), 0.3),
                ],
                samples=self.batch,
            )
        runtime.barrier()

    def log_loss(self, runtime: Runtime) -> float:
        """Of the model that the runtime shows, on samples that nobody trains on."""
        ids, numbers, clicks = self.samples(np.random.default_rng(99), 4000)
        weights, rows = runtime.pull([Read(self.dense.key), Read(self.rows.key, ids)])
        chance = np.clip(_chance(weights, rows, numbers).astype(np.float64), 1e-7, 1 - 1e-7)
        return -float(np.mean(np.where(clicks > 0, np.log(chance), np.log(1 - chance))))


def _chance(weights: Floats, rows: Floats, numbers: Floats) -> Floats:
    """Of a click, [n]."""
    chance: Floats = 1 / (1 + np.exp(-(rows[..., 0].sum(axis=1) + numbers @ weights)))
    return chance
