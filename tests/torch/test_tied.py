"""A weight that several modules of a torch model use."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import psfleet.torch as pst
from psfleet.core.base.errors import UsageError
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from tests.torch.models import ROWS, WIDTH, batches, curve, dense_of, tables_of

KINDS: dict[str, Any] = {
    "adagrad": lambda m: [torch.optim.Adagrad(m.parameters(), 0.1)],
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), 0.1)],
    "adam": lambda m: [
        torch.optim.SparseAdam({id(p): p for p in tables_of(m)}.values(), 0.01),
        torch.optim.Adam(dense_of(m), 0.01),
    ],
}


class Tied(nn.Module):
    """An embedding and two bags over one weight, each with a padding of its own."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse, padding_idx=3)
        self.item = nn.Embedding(ROWS, WIDTH, sparse=sparse, padding_idx=0)
        self.mean = nn.EmbeddingBag(ROWS, WIDTH, mode="mean", sparse=sparse)
        self.item.weight = self.mean.weight = self.bag.weight
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch: Any) -> Any:
        ids = batch["ids"]
        both = self.bag(ids[:, 1:]) * self.item(ids[:, 0]) + self.mean(ids[:, :2])
        logit = self.head(both)[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logit, batch["label"])


@pytest.mark.parametrize(
    ("sparse", "name"), [(True, "adam"), (True, "adagrad"), (False, "sgd"), (False, "adam")]
)
def test_embedding_and_bags(sparse: bool, name: str, fleet: EmbeddedRuntime) -> None:
    """They share one table, and over 20 steps losses and weights are torch's to 1e-5."""
    torch.manual_seed(6)
    plain = Tied(sparse)
    twin = copy.deepcopy(plain)
    kind = KINDS[name] if sparse or name != "adam" else lambda m: [torch.optim.Adam(m.parameters())]
    data = list(batches(20))
    wanted = curve(plain, kind(plain), data)
    moved, opt = pst.convert(twin, kind(twin))
    assert len(fleet.specs()) == 3
    assert moved.item.weight is moved.bag.weight is moved.mean.weight
    np.testing.assert_allclose(curve(moved, [opt], pst.prefetch(data)), wanted, rtol=1e-5)
    state, expected = moved.state_dict(), plain.state_dict()
    assert state.keys() == expected.keys()
    for key, value in state.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
    again = Tied(sparse)
    again.load_state_dict(state)
    assert torch.equal(again.bag.weight, state["bag.weight"])


class Language(nn.Module):
    """An embedding whose weight is also that of the output projection."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, batch: Any) -> Any:
        logits = self.head(self.words(batch["ids"][:, 0]).tanh())
        return nn.functional.cross_entropy(logits, batch["ids"][:, 1])


def test_output_projection() -> None:
    """Tied to a Linear the weight is a dense table."""
    torch.manual_seed(6)
    plain, data = Language(sparse=False), list(batches(20))
    twin = copy.deepcopy(plain)
    expected = curve(plain, [torch.optim.AdamW(plain.parameters(), 0.01)], data)
    moved, opt = pst.convert(twin, torch.optim.AdamW(twin.parameters(), 0.01))
    np.testing.assert_allclose(curve(moved, [opt], data), expected, rtol=1e-5)
    assert moved.head.weight is moved.words.weight


def test_embeddings_of_psfleet() -> None:
    """share() ties them; a weight put into another module is refused, since rows would not follow."""
    model: Any = nn.ModuleList([pst.Embedding(None, 2), pst.EmbeddingBag(None, 2, mode="sum")])
    model[1].weight = model[0].weight
    with pytest.raises(UsageError, match=r"weight of the embedding '1' was replaced.*share"):
        pst.DistributedOptimizer(model, torch.optim.SGD(model.parameters(), 1.0))
    model[1].share(model[0])
    copied = copy.deepcopy(model)
    opt = pst.DistributedOptimizer(model, torch.optim.SGD(model.parameters(), 1.0))
    ids = torch.tensor([[2**40]])
    before = model[0](ids).detach()
    (model[0](ids).sum() + model[1](ids).sum()).backward()
    opt.step()
    torch.testing.assert_close(model[1](ids), before[:, 0] - 2)
    pst.DistributedOptimizer(copied, torch.optim.SGD(copied.parameters(), 1.0))
    assert copied[0].table is copied[1].table is not model[0].table
