"""Torch modules whose rows are on servers, trained in this process."""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

from pathlib import Path
from typing import Any

import torch

import psfleet as ps
import psfleet.torch as pst
from psfleet import fleet
from psfleet.features import (
    Bucketize,
    Cross,
    Feature,
    FeatureSet,
    Input,
    Log1p,
    Lowercase,
    Number,
    Table,
)

FEATURES = FeatureSet(
    [Feature("user", Table("users", 4)), Feature("items", Table("items", 4)), Number("age")]
)
FEATURES_TOML = """
[tables.users]
dim = 4
[tables.items]
dim = 4
[features.user]
table = "users"
[features.items]
table = "items"
[features.age]
"""
BATCH: dict[str, Any] = {
    "user": [5, 7, 5, 900],
    "items": [[1, 2], [3], [4, 4, 9], [2]],
    "age": [0.5, -1.0, 2.0, 0.0],
}


class Click(torch.nn.Module):
    """A click model on features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = pst.FeatureEmbedding(FEATURES)
        self.head = torch.nn.Linear(9, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        """The chance of each sample, [n, 1]."""
        values = list(self.embed(batch).values())
        return torch.sigmoid(self.head(torch.tanh(torch.cat(values, dim=1))))


TRANSFORMED = FeatureSet(
    [
        Input("city"),
        Feature("age_group", Table("ages", 4), transform=Bucketize([18, 30, 60])),
        Feature(
            "place",
            Table("places", 4),
            hashed=True,
            inputs=("city", "age_group"),
            transform=Cross(),
        ),
        Feature("tags", Table("tags", 4), "mean", hashed=True, dtype="text", transform=Lowercase()),
        Number("price", transform=Log1p()),
    ]
)
RAW_BATCH: dict[str, Any] = {
    "city": ["Oslo", "Rome", "Oslo"],
    "age_group": [17.0, 45.0, 99.0],
    "tags": [["Red", "red"], [], ["HAT", "coat", "Red"]],
    "price": [3.0, 0.0, 1200.0],
}


class Transformed(torch.nn.Module):
    """A model on features with transforms, inputs, hashed texts and an empty bag."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = pst.FeatureEmbedding(TRANSFORMED)
        self.score = torch.nn.Linear(13, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        """The score of each sample, [n, 1]."""
        out: torch.Tensor = self.score(torch.cat(list(self.embed(batch).values()), dim=1))
        return out


class Careless(Click):
    """One that makes a constant of an input."""

    def forward(self, batch: Any) -> torch.Tensor:
        """Likewise."""
        return super().forward(batch) + float(batch["age"][0][0])


class Towers(torch.nn.Module):
    """An embedding, a bag and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.item = torch.nn.Embedding(100, 8, sparse=True)
        self.words = torch.nn.EmbeddingBag(100, 8, sparse=True)
        self.last = torch.nn.Linear(18, 1)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The score of each sample, [n, 1]."""
        both = [self.item(ids).sum(1), self.words(ids), numbers]
        out: torch.Tensor = self.last(torch.cat(both, dim=1))
        return out


def towers_inputs(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and numbers."""
    dice = torch.Generator().manual_seed(samples)
    return torch.randint(0, 100, (samples, 2), generator=dice), torch.randn(
        samples, 2, generator=dice
    )


def train(snapshot: Path) -> None:
    """Take a step with each, and save both in one snapshot."""
    ps.reset()
    fleet.init()
    click, towers, transformed = Click(), Towers(), Transformed()
    click, opt = pst.convert(click, [torch.optim.SGD(click.parameters(), 0.5)])
    towers, other = pst.convert(towers, [torch.optim.SGD(towers.parameters(), 0.5)])
    transformed, third = pst.convert(transformed, [torch.optim.SGD(transformed.parameters(), 0.5)])
    click(BATCH).mean().backward()
    opt.step()
    transformed(RAW_BATCH).sum().backward()
    third.step()
    towers(*towers_inputs(4)).mean().backward()
    other.step()
    fleet.save_persistables(str(snapshot))
    ps.reset()
