"""Predicts film ratings: a factorization machine on a ratings file of your own.

    python examples/movielens.py ratings.csv                                    # one process
    psfleet-launch --servers 2 --workers 2 examples/movielens.py ratings.csv    # a cluster

The file is a CSV with the columns userId, movieId and rating, as MovieLens publishes it. Or it has libsvm
lines (`rating index:value index:value ...`) with any number of features. psfleet reads both with `TextFiles`,
which needs pyarrow: `pip install '.[parquet]'`.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import psfleet as ps
from psfleet import UsageError, fleet, initializer, layers, optimizer
from psfleet.data.batches import Batches
from psfleet.data.text_files import TextFiles
from psfleet.features import Feature, FeatureSet, Table

Floats = NDArray[np.float32]
TABLE = Table("ids", 1)  # a column of ids needs the name of a table, though a program makes its own


@dataclass(frozen=True)
class Data:
    """Samples that all have the same number of features.

    Attributes:
        ids, values: int64 and float32 [n, features].
        ratings: float32 [n].
    """

    ids: NDArray[np.int64]
    values: Floats
    ratings: Floats

    def __getitem__(self, rows: NDArray[np.int64]) -> "Data":
        return Data(self.ids[rows], self.values[rows], self.ratings[rows])

    def feed(self, mean: float) -> dict[str, NDArray[np.float32] | NDArray[np.int64]]:
        """Return the program's inputs. Ratings are relative to the mean."""
        return {
            "ids": self.ids,
            "values": self.values,
            "rating": self.ratings[:, None] - np.float32(mean),
        }


def load(path: Path) -> Data:
    """Return the samples of a file: a CSV by its ending, otherwise libsvm lines."""
    if path.suffix.lower() == ".csv":
        columns = FeatureSet([Feature("userId", TABLE), Feature("movieId", TABLE)])
        files = TextFiles(path, columns, ["rating"])
        [batch] = Batches(files, len(files))
        users, films = (batch.features[name].values for name in columns.columns)
        if min(len(users), len(films)) < len(files):
            raise UsageError(f"{path} has a rating without a userId or movieId; add it")
        ids = np.stack([2 * users, 2 * films + 1], axis=1)  # users even, films odd
        return Data(ids, np.ones(ids.shape, np.float32), batch.labels["rating"])
    pairs = Feature("index", TABLE, weighted=True, weights_column="value")
    files = TextFiles(path, FeatureSet([pairs]), ["label"], format="libsvm")
    [batch] = Batches(files, len(files))
    bags = batch.features["index"]
    is_there = np.arange(bags.lengths.max(initial=0)) < bags.lengths[:, None]
    ids = np.full(is_there.shape, -1, np.int64)  # of what a sample lacks, with the value 0
    values = np.zeros(is_there.shape, np.float32)
    ids[is_there], values[is_there] = bags.values, bags.weights
    return Data(ids, values, batch.labels["label"])


class Model:
    """Factorization machine (Rendle, 2010): a weight per feature, and the product of vectors per pair."""

    def __init__(self, features: int, dim: int, seed: int) -> None:
        self.program = ps.Program(random_seed=seed)
        with ps.program_guard(self.program):
            ids = layers.data("ids", [None, features], dtype="int64")
            values = layers.reshape(layers.data("values", [None, features]), [-1, features, 1])
            rating = layers.data("rating", [None, 1])
            weights = layers.embedding(
                ids,
                size=[None, 1],
                is_distributed=True,
                name="weights",
                param_attr=initializer.Constant(0.0),
            )
            vectors = (
                layers.embedding(
                    ids,
                    size=[None, dim],
                    is_distributed=True,
                    name="vectors",
                    param_attr=initializer.Uniform(-0.1, 0.1),
                )
                * values
            )
            total = layers.reduce_sum(vectors, dim=1)
            pairs = layers.square(total) - layers.reduce_sum(layers.square(vectors), dim=1)
            self.found = (
                layers.reduce_sum(weights * values, dim=1)
                + layers.reduce_sum(pairs, dim=1, keep_dim=True) * 0.5
            )
            self.loss = layers.mean(layers.square_error_cost(self.found, rating))
        self.test_program = self.program.clone(for_test=True)
        self.executor = ps.Executor()

    def train(self, data: Data, mean: float, options: argparse.Namespace) -> None:
        """Train for some epochs. The workers share each epoch."""
        with ps.program_guard(self.program):
            made = optimizer.Adam(options.rate, weight_decay=options.decay)
            fleet.distributed_optimizer(made).minimize(self.loss)
        for epoch in range(options.epochs):
            losses = [
                self.executor.run(self.program, data[rows].feed(mean), [self.loss])[0].item()
                for rows in fleet.shard(batches(len(data.ratings), options.batch, epoch))
            ]
            fleet.util.print_on_rank(f"epoch {epoch + 1}   RMSE {np.sqrt(np.mean(losses)):.4f}", 0)

    def error(self, data: Data, mean: float) -> float:
        """Return the root mean square error of the predictions."""
        predictions = [
            self.executor.run(self.test_program, data[rows].feed(mean), [self.found])[0]
            for rows in np.array_split(np.arange(len(data.ratings)), len(data.ratings) // 4096 + 1)
        ]
        return rmse(np.concatenate(predictions)[:, 0] + np.float32(mean), data.ratings)


def batches(count: int, size: int, epoch: int) -> Iterator[NDArray[np.int64]]:
    """Yield the rows in a new order, the same on every worker."""
    order = np.random.default_rng(epoch).permutation(count)
    yield from np.array_split(order, -(-count // size))


def split(data: Data) -> tuple[Data, Data]:
    """Return nine tenths of the samples to train on, and one tenth to test on."""
    order = np.random.default_rng(0).permutation(len(data.ratings))
    tenth = max(1, len(order) // 10)
    return data[order[tenth:]], data[order[:tenth]]


def rmse(predictions: Floats | float, ratings: Floats) -> float:
    """Return the root mean square error."""
    return float(np.sqrt(np.mean(np.square(predictions - ratings, dtype=np.float64))))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="ratings.csv, or libsvm lines")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256, help="ratings per step of a worker")
    parser.add_argument("--rate", type=float, default=0.005, help="learning rate of Adam")
    parser.add_argument("--decay", type=float, default=2e-5, help="L2 on the rows that a step uses")
    parser.add_argument("--dim", type=int, default=8, help="width of a vector")
    parser.add_argument("--out", type=Path, help="folder for the trained model")
    return parser.parse_args()


def main() -> None:
    """Read the file, train, print the error, and save the model."""
    options = parse()
    try:
        data = load(options.file)
    except UsageError as error:
        raise SystemExit(f"movielens.py: {error}") from None
    if len(data.ratings) < 10:
        raise SystemExit(
            f"movielens.py: {options.file} has {len(data.ratings)} ratings; it takes 10 or more"
        )
    fleet.init(strategy=fleet.DistributedStrategy(a_sync=True))  # the launcher's --sync wins
    train, test = split(data)
    mean = float(train.ratings.mean())
    model = Model(data.ids.shape[1], options.dim, seed=1)
    model.train(train, mean, options)
    if fleet.is_first_worker():
        print(f"{len(train.ratings):,} ratings to train on, {len(test.ratings):,} to test on")
        print(
            f"test RMSE {model.error(test, mean):.4f}   of the mean {rmse(mean, test.ratings):.4f}"
        )
    if options.out:
        fleet.save_persistables(str(options.out))
    fleet.barrier_worker()
    fleet.print_table_stat()
    fleet.stop_worker()


if __name__ == "__main__":
    main()
