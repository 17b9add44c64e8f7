"""FeatureEmbedding against torch.nn.EmbeddingBag."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

import psfleet.torch as pst
from psfleet import initializer
from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.engine.runtime_interface import Read
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.features import Feature, FeatureSet, Jagged, Number, Table
from psfleet.optimizer import SGD, Adagrad
from tests.runtimes import CountingRuntime
from tests.torch import models  # noqa: F401  # sets torch's threads

ROWS, SAMPLES = 12, 30


def feature_set(optimizer: Any = None) -> FeatureSet:
    """A sum and a mean over one table, a weighted sum and a single id over another."""
    start = initializer.Normal(0.0, 0.5, seed=3)
    one, two = Table("one", 5, optimizer, start), Table("two", 5, optimizer, start)
    return FeatureSet(
        [
            Feature("sum", one),
            Feature("mean", one, pooling="mean"),
            Feature("weighted", two, weighted=True),
            Feature("single", two),
        ]
    )


def _pulled(rows: Any, ids: Any) -> Any:
    return rows.runtime.pull([Read(rows.key, ids)])[0]


class Plain(torch.nn.Module):
    """The same of torch's own bags."""

    def __init__(self, embed: pst.FeatureEmbedding) -> None:
        super().__init__()
        every = np.arange(ROWS)
        tables: Any = embed.tables
        rows = [_pulled(tables[name].table, every) for name in ("one", "two")]
        bags = [
            torch.nn.EmbeddingBag(
                ROWS, value.shape[1], mode="sum", sparse=True, include_last_offset=True
            )
            for value in rows
        ]
        for bag, value in zip(bags, rows, strict=True):
            bag.weight.data.copy_(torch.from_numpy(value))
        self.one, self.two = bags

    def forward(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        def parts(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            jagged = batch[name]
            return torch.from_numpy(jagged.values), torch.from_numpy(jagged.offsets)

        ids, offsets = parts("mean")
        mean = torch.nn.functional.embedding_bag(
            ids, self.one.weight, offsets, mode="mean", sparse=True, include_last_offset=True
        )
        weights = torch.from_numpy(batch["weighted"].weights)
        return {
            "sum": self.one(*parts("sum")),
            "mean": mean,
            "weighted": self.two(*parts("weighted"), weights),
            "single": self.two(*parts("single")),
        }


def batch_of(step: int) -> dict[str, Jagged]:
    """Repeats within bags and across features, and empty bags."""
    dice = np.random.default_rng(step)

    def jagged(name: str) -> Jagged:
        lengths = np.ones(SAMPLES, np.int64) if name == "single" else dice.integers(0, 5, SAMPLES)
        count = int(lengths.sum())
        weights = dice.uniform(-1, 2, count) if name == "weighted" else None
        return Jagged(dice.integers(0, ROWS, count), lengths, weights=weights)

    return {name: jagged(name) for name in ("sum", "mean", "weighted", "single")}


def loss_of(values: dict[str, torch.Tensor]) -> Any:
    """Depends on every value."""
    return torch.cat([values[name] for name in sorted(values)], 1).tanh().square().mean()


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
def test_the_values_of_torchs_bags(kind: str) -> None:
    """Forward and after several steps values are those of EmbeddingBag under the optimizer of torch.

    torch's Adagrad makes state for every row of a weight at once; that of a table without a number of rows
    is psfleet's.
    """
    own = Adagrad(0.1, epsilon=1e-10) if kind == "Adagrad" else None
    embed = pst.FeatureEmbedding(feature_set(own))
    given = None if own else getattr(torch.optim, kind)(embed.parameters(), 0.1)
    opt = pst.DistributedOptimizer(embed, given)
    plain = Plain(embed)
    expected = getattr(torch.optim, kind)(plain.parameters(), 0.1)
    for step in range(6):
        batch = batch_of(step)
        ours, theirs = embed(batch), plain(batch)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)
        for loss, optimizer in ((loss_of(ours), opt), (loss_of(theirs), expected)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_one_pull_and_one_push() -> None:
    """A step reads all tables in one pull and sends all gradients in one push."""
    runtime = CountingRuntime()
    embed = pst.FeatureEmbedding(feature_set(SGD(0.1)))
    opt = pst.DistributedOptimizer(embed, runtime=runtime)
    runtime.calls.clear()
    loss_of(embed(batch_of(0))).backward()
    opt.step()
    assert runtime.calls == [("pull", 2), ("push", 2), ("pull", 0)]
    runtime.close()


def test_the_same_values_within_a_step() -> None:
    """A forward pass that is computed again sees the rows of the first one, unharmed by the user."""
    runtime = CountingRuntime()
    embed = pst.FeatureEmbedding(feature_set(SGD(0.1)))
    pst.DistributedOptimizer(embed, runtime=runtime)
    first = embed(batch_of(0))
    kept = {name: value.detach().clone() for name, value in first.items()}
    with torch.no_grad():
        for value in first.values():
            value.zero_()
    runtime.calls.clear()
    for name, value in embed(batch_of(0)).items():
        torch.testing.assert_close(value, kept[name], rtol=0, atol=0)
    assert runtime.calls == []
    runtime.close()


def test_a_feature_without_gradient() -> None:
    """Rows of features that the loss does not use get no gradient, nor do numbers."""
    features = FeatureSet([*feature_set(SGD(1.0)), Number("age", 2)])
    embed = pst.FeatureEmbedding(features)
    opt = pst.DistributedOptimizer(embed)
    values = embed({"single": [3, 4], "sum": [[1], [2]], "age": [[1, 2], [3, 4]]})
    assert not values["age"].requires_grad
    values["single"].sum().backward()
    tables: Any = embed.tables
    assert tables["one"].weight.grad is None
    assert tables["two"].weight.grad._nnz() == 2
    opt.step()


@pytest.mark.parametrize("change", ["none", "coalesced", "half", "zeroed"])
def test_gradients_of_several_passes(change: str) -> None:
    """Gradients add up over backward passes, and what a user does to them counts."""
    gradients = []
    for passes in ([0, 1], [1]):
        embed = pst.FeatureEmbedding(feature_set(SGD(0.1)))
        tables: Any = embed.tables
        weight, rows = tables["two"].weight, tables["two"].table
        opt = pst.DistributedOptimizer(embed, runtime=EmbeddedRuntime())
        for number in passes:
            if change == "zeroed" and number == 1 and weight.grad is not None:
                weight.grad.zero_()
            loss_of(embed(batch_of(number))).backward()
        if change == "coalesced":
            weight.grad = weight.grad.coalesce()
        elif change == "half" and len(passes) == 2:
            indices, values = weight.grad._indices(), weight.grad._values()
            late = slice(2 * SAMPLES, None)  # the bags of the second pass
            part = indices[:, late], values[late]
            weight.grad = torch.sparse_coo_tensor(*part, weight.shape, check_invariants=False)
        gradient = rows.gradient()
        opt.step()
        gradients.append((gradient, _pulled(rows, np.arange(ROWS))))
        opt.runtime.close()
    (both, after), (last, after_last) = gradients
    if change in ("half", "zeroed"):
        assert set(both.ids.tolist()) == set(last.ids.tolist())
        np.testing.assert_allclose(after, after_last, rtol=1e-6, atol=1e-7)
        return
    assert len(both.ids) > len(last.ids)
    whole = np.zeros((ROWS, 5), np.float32)
    np.add.at(whole, both.ids, both.rows)
    np.testing.assert_allclose(_pulled_first() - 0.1 * whole, after, rtol=1e-5, atol=1e-6)


def _pulled_first() -> Any:
    """The first rows of table two."""
    embed = pst.FeatureEmbedding(feature_set(SGD(0.1)))
    opt = pst.DistributedOptimizer(embed, runtime=EmbeddedRuntime())
    tables: Any = embed.tables
    rows = _pulled(tables["two"].table, np.arange(ROWS))
    opt.runtime.close()
    return rows


def test_state_dict() -> None:
    """A state dict has the tables' ids and rows by name, and another fleet can load it."""
    embed = pst.FeatureEmbedding(feature_set(SGD(0.1)))
    opt = pst.DistributedOptimizer(embed)
    loss_of(embed(batch_of(0))).backward()
    opt.step()
    saved = embed.state_dict()
    assert sorted(saved) == [
        "tables.one.ids",
        "tables.one.weight",
        "tables.two.ids",
        "tables.two.weight",
    ]
    other = pst.FeatureEmbedding(feature_set(SGD(0.1)))
    runtime = EmbeddedRuntime()
    pst.DistributedOptimizer(other, runtime=runtime)
    other.load_state_dict(saved)
    for name, value in other(batch_of(1)).items():
        torch.testing.assert_close(value, embed(batch_of(1))[name], rtol=0, atol=0)
    runtime.close()


def test_tensors() -> None:
    """Ids in tensors, padded or with lengths, give the same as arrays."""
    embed = pst.FeatureEmbedding(FeatureSet([Feature("f", Table("t", 2, SGD(1.0)), padding=0)]))
    pst.DistributedOptimizer(embed)
    expected = embed({"f": [[3], [4, 3]]})["f"]
    for ids in (
        torch.tensor([[3, 0], [4, 3]]),
        {"values": torch.tensor([3, 4, 3]), "lengths": torch.tensor([1, 2])},
    ):
        torch.testing.assert_close(embed({"f": ids})["f"], expected, rtol=0, atol=0)


def test_refusals() -> None:
    """A look-up without a table, a dotted name and a copy are refused with the table's name."""
    embed = pst.FeatureEmbedding(feature_set(SGD(0.1)))
    with pytest.raises(UsageError, match="'one' has no table yet"):
        embed(batch_of(0))
    with pytest.raises(ConfigError, match=r"table 'a\.b' has a dot"):
        pst.FeatureEmbedding(FeatureSet([Feature("f", Table("a.b", 2))]))
    pst.DistributedOptimizer(embed)
    with pytest.raises(UsageError, match="'one' has no number of rows"):
        copy.deepcopy(embed)


def test_tables_named_like_methods() -> None:
    """A table may have the name of a method or attribute of torch's modules; it trains and is saved."""
    names = [name for name in dir(torch.nn.ModuleDict()) if not name.startswith("__")]
    assert {"items", "keys", "values", "type", "train", "forward", "training"} <= set(names)
    features = FeatureSet(Feature(f"of {name}", Table(name, 2, SGD(0.5))) for name in names)
    embed = pst.FeatureEmbedding(features)
    opt = pst.DistributedOptimizer(embed)
    batch = {feature.name: torch.tensor([7]) for feature in features}
    before = embed(batch)
    torch.cat(list(before.values())).sum().backward()
    opt.step()
    for name, value in embed(batch).items():
        torch.testing.assert_close(value, before[name] - 0.5)
    saved = embed.state_dict()
    assert {f"tables.{name}.weight" for name in names} <= saved.keys()
    embed.load_state_dict(saved)
    assert saved["tables.items.ids"].tolist() == [7]
