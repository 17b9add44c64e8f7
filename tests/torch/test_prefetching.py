"""prefetch(): same bits with fewer calls, whatever the batches look like."""

from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import psfleet.torch as pst
from psfleet.errors import UsageError
from tests.runtimes import CountingRuntime


class Model(torch.nn.Module):
    """Looks up columns of one tensor in two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.left = pst.Embedding(None, 3, seed=1)
        self.right = pst.EmbeddingBag(None, 3, mode="sum", seed=2)

    def forward(self, x: Any) -> Any:
        return (self.left(x[:, 0]) * self.right(x[:, 2:])).sum(1)


def run(loader: Any, take: Any, **options: Any) -> tuple[list[float], list[tuple[str, int]]]:
    """Losses and calls of training over a loader."""
    runtime = CountingRuntime()
    model = Model()
    opt = pst.DistributedOptimizer(model, torch.optim.SGD(model.parameters(), 0.5), runtime=runtime)
    if "ids" in options:
        options["ids"] = options["ids"](model)
    runtime.calls.clear()
    losses = []
    for batch in pst.prefetch(loader, **options) if options.pop("ahead", True) else loader:
        loss = (model(take(batch)) - 1).square().sum()
        losses.append(loss.item())
        opt.clear_grad()
        loss.backward()
        opt.step()
    runtime.close()
    return losses, runtime.calls


class Pair(NamedTuple):
    """A batch with names."""

    x: Any
    y: Any


IDS = torch.randint(0, 30, (50, 5), generator=torch.Generator().manual_seed(1))
PLAIN = [IDS[i : i + 16] for i in range(0, 50, 16)]  # the last is shorter
SHAPES = {
    "tensor": (PLAIN, lambda b: b),
    "loader": (DataLoader(TensorDataset(IDS, IDS), batch_size=16), lambda b: b[0]),
    "dict": ([{"a": {"x": x.clone()}, "n": 1} for x in PLAIN], lambda b: b["a"]["x"]),
    "named": ([Pair(x.clone(), None) for x in PLAIN], lambda b: b.x),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_here_before_they_are_looked_up(shape: str) -> None:
    """After the first batch no lookup pulls, and the losses are those without prefetching."""
    loader, take = SHAPES[shape]
    expected, slow = run(loader, take, ahead=False)
    actual, fast = run(loader, take)
    assert actual == expected
    assert slow == [("pull", 1), ("pull", 1), ("push", 2), ("pull", 0)] * 4
    assert fast == [("pull", 1)] * 2 + [("push", 2), ("pull", 2)] * 3 + [("push", 2), ("pull", 0)]


def test_computed_ids_are_named() -> None:
    """Ids that are not in the batch are pulled when looked up, or in time if `ids` names them."""

    def take(batch: Any) -> Any:
        return batch * 7

    expected, slow = run(PLAIN, take)
    actual, fast = run(
        PLAIN, take, ids=lambda m: lambda b: {m.left: b[:, 0] * 7, m.right: b[:, 2:] * 7}
    )
    assert actual == expected
    assert len(slow) == 16
    assert len(fast) == 10


def test_a_loop_that_is_left() -> None:
    """A loop may be left early; two at a time are refused."""
    model = Model()
    pst.DistributedOptimizer(model, torch.optim.SGD(model.parameters(), 0.5))
    first = pst.prefetch(PLAIN)
    next(first)
    with pytest.raises(UsageError, match="two prefetch"):
        next(pst.prefetch(PLAIN))
    first.close()
    assert len(list(pst.prefetch(PLAIN))) == 4
    assert list(pst.prefetch([])) == []
