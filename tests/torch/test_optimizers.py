"""DistributedOptimizer: calls, rates, closures, workers; prefetch(); recomputing by torch's checkpoints."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import psfleet.torch as pst
from psfleet import fleet as fleet_api
from psfleet.core.base.errors import UsageError
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.leaks import nothing_left
from tests.runtimes import CountingRuntime
from tests.torch.models import MODELS, OPTIMIZERS, DeepFM, batches, curve, dense_of, tables_of
from tests.trainings import in_threads


@pytest.mark.parametrize("model", MODELS)
def test_one_push_and_one_pull(model: str) -> None:
    """A step is one push of all gradients and, with prefetch(), one pull of all values."""
    runtime = CountingRuntime()
    moved = MODELS[model]()
    moved, opt = pst.convert(moved, OPTIMIZERS["adam"](moved), runtime=runtime)
    tables, dense = 2, len(dense_of(moved)) - 2
    runtime.calls.clear()
    curve(moved, [opt], pst.prefetch(batches(4)))
    last = ("pull", dense)
    fused = [("push", dense + tables), ("pull", dense + tables)]
    assert runtime.calls == [("pull", 1)] * tables + 3 * fused + [fused[0], last]
    runtime.close()


def test_closure_and_hooks() -> None:
    """step(closure) computes the loss with gradients and returns it; torch's step hooks run."""
    model = torch.nn.Linear(2, 1)
    model, opt = pst.convert(model, torch.optim.SGD(model.parameters(), 0.1))
    seen = []
    opt.register_step_post_hook(lambda *_: seen.append(1))

    def closure() -> Any:
        opt.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    first = opt.step(closure)
    assert float(opt.step(closure).detach()) < float(first.detach())
    assert seen == [1, 1]


def test_parameters_without_gradient_rest() -> None:
    """As in torch, what got no gradient is not updated, not even by its decay."""
    model: Any = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
    model, opt = pst.convert(model, torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5))
    before = copy.deepcopy(model.state_dict())
    model[0](torch.ones(1, 2)).sum().backward()
    opt.step()
    assert torch.equal(model[1].weight, before["1.weight"])
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_names_and_numbers(fleet: EmbeddedRuntime) -> None:
    """Tables have the names of the parameters; a second model's are numbered or get a prefix."""
    for name in ("", "", "other"):
        model = torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True), torch.nn.Linear(2, 1))
        pst.convert(model, torch.optim.SGD(model.parameters(), 0.1), name=name)
    expected = "0 1.weight 1.bias 0~2 1.weight~2 1.bias~2 other.0 other.1.weight other.1.bias"
    assert {spec.name for spec in fleet.specs().values()} == set(expected.split())


def test_values_set_by_hand() -> None:
    """Values that the servers did not see are refused at the step; upload() makes them the fleet's, refresh()
    takes them back."""
    model = torch.nn.Linear(2, 1, bias=False)
    model, opt = pst.convert(model, torch.optim.SGD(model.parameters(), 0.5))
    before = model.weight.tolist()
    for go_on, expected in ((opt.refresh, before), (opt.upload, [[3, 3]])):
        with torch.no_grad():
            model.weight.fill_(3)
        with pytest.raises(UsageError, match=r"'weight' was changed in place .* opt\.upload\(\)"):
            opt.step()
        go_on()
        assert model.weight.tolist() == expected
        opt.step()
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    assert model.weight.tolist() == [[2.5, 2.5]]


class Shortened(torch.nn.Module):
    """A parameter whose rows are looked up by a function of torch."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.full((4, 2), 3.0))
        self.options = options

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.options.pop("bag", False):
            bags = torch.nn.functional.embedding_bag(ids, self.rows, **self.options)
            return bags.sum()
        return torch.nn.functional.embedding(ids, self.rows, **self.options).sum()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_norm": 1.0}, "leave max_norm out"),
        ({"max_norm": 1.0, "bag": True}, "leave max_norm out"),
        ({"sparse": True}, "'rows' has a dense table and got a sparse gradient"),
    ],
)
def test_functional_embedding(options: dict[str, Any], words: str) -> None:
    """What F.embedding does to rows, and the servers cannot follow, is refused at the step."""
    model = Shortened(**options)
    model, opt = pst.convert(model, torch.optim.SGD(model.parameters(), 0.5))
    model(torch.tensor([[0, 1]])).backward()
    with pytest.raises(UsageError, match=words):
        opt.step()


def test_saved_and_loaded(tmp_path: Path) -> None:
    """Training goes on with the same bits from what fleet.save_persistables wrote."""
    model = DeepFM()
    model, opt = pst.convert(model, OPTIMIZERS["adam"](model))
    curve(model, [opt], batches(10))
    fleet_api.save_persistables(str(tmp_path / "model"))
    expected = curve(model, [opt], batches(10, 2))
    fleet_api.load_model(str(tmp_path / "model"))
    opt.refresh()
    assert curve(model, [opt], batches(10, 2)) == expected


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute(reentrant: bool, fleet: EmbeddedRuntime) -> None:
    """Losses are the same bits when an embedding's block is recomputed in the backward pass."""
    torch.manual_seed(3)
    plain = MODELS["sequence"]()
    twin = copy.deepcopy(plain)
    moved, opt = pst.convert(plain, OPTIMIZERS["adam"](plain))
    expected = curve(moved, [opt], batches(30))
    moved, opt = pst.convert(twin, OPTIMIZERS["adam"](twin))
    user: Any = moved.get_submodule("towers.user")
    touch = torch.zeros((), requires_grad=True)  # a reentrant block needs an input with gradient

    def whole(batch: Any) -> Any:
        return checkpoint(lambda b, _: moved(b), batch, touch, use_reentrant=reentrant)

    assert curve(whole, [opt], batches(30)) == expected
    assert not user.table._held


def test_two_workers() -> None:
    """In sync mode two workers with half the batch each train as one with the whole batch."""
    torch.manual_seed(4)
    start = DeepFM()
    halves = [list(batches(30, seed)) for seed in (1, 2)]
    whole = [
        {key: torch.cat([one[key], other[key]]) for key in ("ids", "numbers", "label")}
        for one, other in zip(*halves, strict=True)
    ]
    alone = copy.deepcopy(start)
    alone, opt = pst.convert(alone, OPTIMIZERS["sgd"](alone))
    expected = np.array(curve(alone, [opt], whole))
    actual: list[list[float]] = [[], []]
    states: list[Any] = [{}, {}]

    with nothing_left(), LocalFleet(2, 2, in_process=True) as fleet:

        def work(worker: int) -> None:
            runtime = fleet.connect(worker, "sync")
            model = copy.deepcopy(start)
            if worker == 1:  # worker 0's values count
                torch.nn.init.zeros_(model.mlp.get_parameter("0.weight"))
            model, opt = pst.convert(model, OPTIMIZERS["sgd"](model), runtime=runtime)
            actual[worker] = curve(model, [opt], halves[worker])
            runtime.flush()
            states[worker] = model.state_dict()
            runtime.close()

        in_threads([lambda: work(0), lambda: work(1)])
    np.testing.assert_allclose(np.mean(actual, axis=0), expected, rtol=1e-4)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert len(tables_of(start)) == 2


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
