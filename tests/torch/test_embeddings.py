"""Embedding and EmbeddingBag against torch's own."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

import psfleet.torch as pst
from psfleet import fluid, initializer
from psfleet import optimizer as fleet_optimizer
from psfleet.core.base.errors import UsageError
from psfleet.core.engine.runtime_interface import Read
from psfleet.core.engine.schema.entry import ProbabilityEntry
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from tests.torch import models  # noqa: F401  # sets torch's threads


def twins(mode: Any, **options: Any) -> tuple[Any, Any]:
    """The same weights in torch's bag and in ours, whose table plain SGD updates."""
    torch.manual_seed(2)
    plain = torch.nn.EmbeddingBag(20, 4, mode=mode, **options)
    ours = pst.EmbeddingBag(20, 4, mode=mode, **options)
    ours.table.content = plain.weight.detach().numpy().copy()
    pst.DistributedOptimizer(ours, torch.optim.SGD(ours.parameters(), 1.0))
    return plain, ours


@pytest.mark.parametrize("padding", [None, 3, -1])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(mode: str, padding: int | None) -> None:
    """Values and gradients are torch's, for flat and for two-dimensional input, with empty bags."""
    plain, ours = twins(mode, padding_idx=padding)
    ids = torch.tensor([3, 3, 1, 19, 1, 5, 3, 19])
    for arguments in [
        (ids, torch.tensor([0, 0, 2, 7])),
        (ids.reshape(4, 2),),
        (ids.reshape(2, 4),),
        (ids.int(), torch.tensor([0, 3]).int()),
        (ids[:0], torch.tensor([0, 0])),
        (ids[:0].reshape(0, 2),),
    ]:
        expected, actual = plain(*arguments), ours(*arguments)
        torch.testing.assert_close(actual, expected)
        factors = torch.randn_like(expected)
        for module, out in ((plain, expected), (ours, actual)):
            module.zero_grad()
            (out * factors).sum().backward()
        torch.testing.assert_close(ours.weight.grad.to_dense(), plain.weight.grad)


def test_weighted_bags() -> None:
    """per_sample_weights scale each row and get their own gradients."""
    plain, ours = twins("sum", include_last_offset=True)
    ids, offsets = torch.tensor([3, 1, 1, 7]), torch.tensor([0, 1, 4])
    grads = []
    for module in (plain, ours):
        factors = torch.tensor([0.5, -1.0, 2.0, 3.0], requires_grad=True)
        module(ids, offsets, factors).square().sum().backward()
        grads.append(factors.grad)
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(ours.weight.grad.to_dense(), plain.weight.grad)


def table(**options: Any) -> tuple[pst.Embedding, pst.DistributedOptimizer]:
    """An embedding of any id under plain SGD of rate 1."""
    embedding = pst.Embedding(None, 2, name="table", **options)
    return embedding, pst.DistributedOptimizer(
        embedding, torch.optim.SGD(embedding.parameters(), 1.0)
    )


def test_any_id() -> None:
    """Rows of any int64 appear, repeated ids are summed, and gradients accumulate over backward passes."""
    emb, opt = table(initializer=initializer.Constant(2.0))
    ids = torch.tensor([[2**63 - 1, -(2**63)], [-(2**63), 5]])
    assert emb(ids).shape == (2, 2, 2)
    emb(ids).sum().backward()
    (3 * emb(torch.tensor([5]))).sum().backward()
    opt.step()
    assert emb(ids)[..., 0].tolist() == [[1, 0], [0, -2]]
    opt.step()  # torch keeps gradients until they are cleared
    assert emb(ids)[..., 0].tolist() == [[0, -2], [-2, -6]]
    opt.clear_grad()
    opt.step()
    assert emb(ids)[..., 0].tolist() == [[0, -2], [-2, -6]]
    emb(torch.tensor([7])).sum().backward()
    opt.step()
    assert emb(torch.tensor([7, 5]))[:, 0].tolist() == [1, -6]


def test_padding() -> None:
    """The padding row is zero and stays so, also where ids are any int64."""
    emb, opt = table(initializer=initializer.Constant(2.0), padding_idx=-7)
    out = emb(torch.tensor([-7, 3]))
    assert out.tolist() == [[0, 0], [2, 2]]
    out.sum().backward()
    opt.step()
    assert emb(torch.tensor([-7, 3])).tolist() == [[0, 0], [1, 1]]


def test_zero_grad_in_every_form() -> None:
    """Gradients vanish through the optimizer or the model, set to None or to zero."""
    emb, opt = table(initializer=initializer.Constant(0.0))
    for clear in (
        opt.zero_grad,
        opt.clear_grad,
        emb.zero_grad,
        lambda: opt.zero_grad(set_to_none=False),
        lambda: emb.zero_grad(set_to_none=False),
    ):
        emb(torch.tensor([1, 2])).sum().backward()
        clear()
        (2 * emb(torch.tensor([2]))).sum().backward()
        before = emb(torch.tensor([1, 2]))[:, 0].tolist()
        opt.step()
        assert emb(torch.tensor([1, 2]))[:, 0].tolist() == [before[0], before[1] - 2]
        opt.zero_grad()


def test_frozen_and_without_gradients() -> None:
    """Nothing is collected under no_grad or while the weight needs no gradient."""
    emb, _ = table()
    with torch.no_grad():
        assert not emb(torch.tensor([1])).requires_grad
    emb.weight.requires_grad_(False)
    assert not emb(torch.tensor([1])).requires_grad


def test_outputs_may_be_changed_in_place() -> None:
    """An in-place operation on an output changes neither the table nor a later lookup."""
    emb, _ = table(initializer=initializer.Constant(2.0))
    for _ in range(3):
        out = emb(torch.tensor([1]))
        assert out.tolist() == [[2, 2]]
        out.mul_(5)


def test_entry(fleet: EmbeddedRuntime) -> None:
    """An embedding's entry is its table's: a part of the unknown ids gets a row."""
    emb, opt = table(initializer=initializer.Constant(2.0), entry=ProbabilityEntry(0.25))
    emb(torch.arange(1000)).sum().backward()
    opt.step()
    [spec] = fleet.specs().values()
    assert spec.entry == ProbabilityEntry(0.25)
    assert 180 < int((emb(torch.arange(1000))[:, 0] == 1).sum()) < 320


def test_stand_in_takes_no_memory(fleet: EmbeddedRuntime) -> None:
    """The stand-in has the weight's shape, reads as NaN and is not given memory by .half()."""
    emb = pst.Embedding(10**9, 64, name="large")
    pst.DistributedOptimizer(emb, torch.optim.SGD(emb.parameters(), 1.0))
    for module in (emb, emb.half()):
        assert module.weight.shape == (10**9, 64)
        assert module.weight.untyped_storage().nbytes() == 4
        assert bool(module.weight[5, 5].isnan())
        rows = fleet.pull([Read(emb.table.key, np.array([3]))])[0]
        assert torch.equal(module(torch.tensor([3])), torch.from_numpy(rows))


def test_copies(fleet: EmbeddedRuntime) -> None:
    """A copy has its own rows; where they cannot be brought it is refused."""
    emb, _ = table()
    with pytest.raises(UsageError, match="'table' has no number of rows, so a copy"):
        copy.deepcopy(emb)
    large = pst.Embedding(10**12, 64, name="large")
    pst.DistributedOptimizer(large, torch.optim.SGD(large.parameters(), 1.0))
    with pytest.raises(UsageError, match="'large' has 1000000000000 rows"):
        copy.deepcopy(large)
    bag = pst.EmbeddingBag(5, 2, "max", padding_idx=1)
    unmade = copy.deepcopy(bag)
    assert unmade.weight is unmade.table.weight
    assert unmade.table is not bag.table
    pst.DistributedOptimizer(bag, torch.optim.SGD(bag.parameters(), 1.0))
    plain: Any = copy.deepcopy(bag)
    assert type(plain) is torch.nn.EmbeddingBag
    assert torch.equal(plain.weight, bag.weight.detach())
    assert (plain.mode, plain.padding_idx) == ("max", 1)


def trained(own: Any, steps: int = 4) -> Any:
    """Rows 1 and 2 of an embedding under an optimizer of psfleet; only the first step names row 2."""
    users = pst.Embedding(None, 2, name="users", optimizer=own)
    opt = pst.DistributedOptimizer(torch.nn.Sequential(users), runtime=EmbeddedRuntime())
    for step in range(steps):
        users(torch.tensor([1] if step else [1, 2])).sum().backward()
        opt.step()
        opt.zero_grad()
    return opt.runtime.pull([users.table.read(np.array([1, 2]))])[0]


def test_own_optimizer_counts_updates() -> None:
    """A schedule that counts updates goes on with each step."""
    own = fleet_optimizer.SGD(fluid.layers.piecewise_decay([2], [1.0, 0.5]))
    moved = trained(own)[0] - trained(fleet_optimizer.SGD(0.0))[0]
    np.testing.assert_allclose(moved, -3.0, atol=1e-6)  # 1 + 1 + 0.5 + 0.5
    assert own.get_lr() == 0.5


def test_own_optimizer_visits_every_row() -> None:
    """Adam's mode "full" moves rows without a gradient, the mode "lazy" does not."""
    full, lazy, once = (
        trained(fleet_optimizer.Adam(0.1, sparse_mode=mode), steps)
        for mode, steps in (("full", 4), ("lazy", 4), ("full", 1))
    )
    assert np.all(full[1] < once[1])
    np.testing.assert_array_equal(lazy[1], once[1])
