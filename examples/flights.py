"""Predicts whether a flight arrives more than 15 minutes late: a wide & deep model on 336,776 real flights.

    python examples/flights.py                                          # embedded, one process
    psfleet-launch --servers 2 --workers 2 examples/flights.py          # a cluster, async
    psfleet-launch --servers 2 --workers 2 --sync examples/flights.py   # the same in sync mode

It trains on January to September. `Settings` was chosen on October (`--choose` repeats that). November and
December are used only for the final figures. docs/flights.md has the whole study.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flights_data
import flights_report
import numpy as np
from flights_data import FIELDS, NUMBERS, Flights
from numpy.typing import NDArray

import psfleet as ps
from psfleet import fleet, initializer, layers, metrics, optimizer

CHOOSE, TEST = range(10, 11), range(11, 13)  # months


@dataclass(frozen=True)
class Settings:
    """Settings of the model and of its training. The defaults are the best that `choose` found on October.

    Attributes:
        epochs: Number of passes over the training flights.
        batch: Number of flights per step of a worker.
        rate: Initial learning rate of Adam. It decreases linearly to a twentieth.
        dim: Width of an id's embedding.
        hidden: Width of the hidden layer.
        seed: Seed of the order of the flights and of the initial weights.
        precision: Storage format of embedding rows on the servers.
    """

    epochs: int = 1
    batch: int = 256
    rate: float = 0.001
    dim: int = 8
    hidden: int = 64
    seed: int = 1
    precision: Any = "float32"


class Model:
    """Wide & deep model.

    Wide: one weight for each id. Deep: embeddings and numbers through one hidden layer.
    """

    def __init__(self, settings: Settings, name: str = "flights") -> None:
        self.name = name
        self.program = ps.Program(random_seed=settings.seed)
        with ps.program_guard(self.program):
            ids = layers.data("ids", [None, len(FIELDS)], dtype="int64")
            numbers = layers.data("numbers", [None, len(NUMBERS)])
            late = layers.data("late", [None, 1])
            wide = layers.reduce_sum(
                layers.embedding(
                    ids,
                    size=[None, 1],
                    is_distributed=True,
                    name=f"{name}.wide",
                    param_attr=initializer.Constant(0.0),
                ),
                dim=1,
            )
            deep = layers.embedding(
                ids,
                size=[None, settings.dim],
                is_distributed=True,
                name=f"{name}.deep",
                param_attr=ps.ParamAttr(precision=settings.precision),
            )
            deep = layers.reshape(deep, [-1, len(FIELDS) * settings.dim])
            deep = layers.fc(
                layers.concat([deep, numbers], axis=1),
                settings.hidden,
                act="relu",
                name=f"{name}.hidden",
            )
            logit = (
                layers.fc(deep, 1, name=f"{name}.logit", bias_attr=initializer.Constant(-1.2))
                + wide
            )  # a quarter are late
            self.loss = layers.mean(layers.sigmoid_cross_entropy_with_logits(logit, late))
            self.probability = layers.sigmoid(logit)
        self.test_program = self.program.clone(for_test=True)
        self.executor = ps.Executor()


def train(
    model: Model, flights: Flights, rows: NDArray[np.int64], settings: Settings
) -> list[float]:
    """Train on these flights, which the workers share. Returns the loss of each step of this worker."""
    steps = -(-settings.epochs * steps_of(rows, settings) // fleet.worker_num())
    decay = optimizer.lr.PolynomialDecay(settings.rate, steps, end_lr=settings.rate / 20)
    rate = fleet.remember(f"rate of {model.name}", decay)  # if a worker starts again, too
    with ps.program_guard(model.program):
        fleet.distributed_optimizer(optimizer.Adam(rate)).minimize(model.loss)
    losses: list[float] = []
    for batch in fleet.shard(batches(rows, settings)):
        (loss,) = model.executor.run(model.program, flights.feed(batch), [model.loss])
        rate.step()
        losses.append(float(loss))
        if len(losses) % 100 == 0:
            fleet.util.print_on_rank(
                f"step {len(losses):,} of {steps:,}   loss {np.mean(losses[-100:]):.4f}", rank_id=0
            )
    return losses


def batches(rows: NDArray[np.int64], settings: Settings) -> Iterator[NDArray[np.int64]]:
    """Yield the rows in a new order for each epoch, the same on every worker."""
    rng = np.random.default_rng(settings.seed)
    for _ in range(settings.epochs):
        order = rng.permutation(rows)
        yield from np.array_split(order, steps_of(rows, settings))


def steps_of(rows: NDArray[np.int64], settings: Settings) -> int:
    """Return the number of steps of an epoch. Batch sizes differ by at most one flight."""
    return max(1, len(rows) // settings.batch)


def predict(model: Model, flights: Flights, months: range) -> NDArray[np.float32]:
    """Return the probability of being late for each flight of these months. The workers share the work."""
    rows = flights.rows(months)
    predictions = np.zeros(len(rows), np.float32)
    for part in fleet.shard(np.array_split(np.arange(len(rows)), len(rows) // 4096 + 1)):
        (probability,) = model.executor.run(
            model.test_program, flights.feed(rows[part]), [model.probability]
        )
        predictions[part] = probability[:, 0]
    return fleet.util.all_reduce(predictions)  # each worker's part, zero elsewhere


def score(flights: Flights, months: range, predictions: NDArray[np.float32]) -> tuple[float, float]:
    """Return AUC and log loss of the predictions for these months."""
    late = flights.late[flights.rows(months)]
    return metrics.auc(late, predictions), metrics.log_loss(late, predictions)


def choose(flights: Flights, rows: NDArray[np.int64], settings: Settings) -> None:
    """Vary one setting at a time, and print the scores on October, as the mean of two seeds."""
    around: dict[str, tuple[Any, ...]] = {
        "epochs": (1, 2),
        "batch": (128, 256, 512),
        "rate": (0.0005, 0.001, 0.002, 0.004),
        "dim": (4, 8, 16),
        "hidden": (32, 64, 128),
    }
    trials = {
        dataclasses.replace(settings, **{name: value})
        for name, values in around.items()
        for value in values
    }
    for trial in sorted(trials, key=dataclasses.astuple):
        scores = []
        for seed in (1, 2):
            seeded = dataclasses.replace(trial, seed=seed)
            model = Model(seeded, name=f"{dataclasses.astuple(seeded)}")
            train(model, flights, rows, seeded)
            scores.append(score(flights, CHOOSE, predict(model, flights, CHOOSE)))
        auc, loss = np.mean(scores, axis=0)
        fleet.util.print_on_rank(f"October: AUC {auc:.4f}  log loss {loss:.4f}  {trial}", 0)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--precision", default=Settings.precision, help="of embeddings: bfloat16")
    parser.add_argument(
        "--train-to",
        type=int,
        default=9,
        choices=(9, 10),
        metavar="MONTH",
        help="last month to train on: 9, or 10 (then October's figures mean nothing)",
    )
    parser.add_argument("--flights", type=int, metavar="N", help="train on N flights only")
    parser.add_argument("--choose", action="store_true", help="try other settings on October")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of flights.png and model/")
    return parser.parse_args()


def main() -> None:
    """Train, predict October, November and December, print the scores, and save the model."""
    options = parse()
    fleet.init(strategy=fleet.DistributedStrategy(a_sync=True))  # the launcher's --sync wins
    months = range(1, options.train_to + 1)
    flights = flights_data.load().ranked(months)
    settings = Settings(epochs=options.epochs, seed=options.seed, precision=options.precision)
    rows = np.random.default_rng(0).permutation(flights.rows(months))[: options.flights]
    if options.choose:
        choose(flights, rows, settings)
        return
    model, began = Model(settings), time.perf_counter()
    losses = train(model, flights, rows, settings)
    pace = settings.epochs * len(rows) / (time.perf_counter() - began)
    october, test = predict(model, flights, CHOOSE), predict(model, flights, TEST)
    fleet.save_persistables(str(options.out / "model"))
    if fleet.is_first_worker():
        print(
            flights_report.table(
                score(flights, CHOOSE, october), score(flights, TEST, test), months, pace
            )
        )
        flights_report.plot(
            options.out / "flights.png", losses, flights.late[flights.rows(TEST)], test
        )
    fleet.print_table_stat()
    fleet.stop_worker()


if __name__ == "__main__":
    main()
