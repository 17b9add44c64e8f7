"""torch.compile, torch.export, torch.jit and torch.fx on models whose rows are on the servers."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import psfleet.torch as pst
from psfleet.core.base.errors import UsageError
from psfleet.features import Feature, FeatureSet, Table
from psfleet.optimizer import SGD


class Towers(torch.nn.Module):
    """An embedding, a bag and a layer over both."""

    def __init__(self) -> None:
        super().__init__()
        self.item = torch.nn.Embedding(100, 8, sparse=True)
        self.words = torch.nn.EmbeddingBag(100, 8, sparse=True, padding_idx=0)
        self.head = torch.nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.cat([self.item(ids).sum(1), self.words(ids)], 1))
        return out


@pytest.fixture
def compiler() -> Iterator[Any]:
    """What torch.compile did in this test."""
    from torch._dynamo.utils import counters  # after the check for torch

    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


def trained(model: Any) -> tuple[Any, Any]:
    """The model on the fleet, with its optimizer."""
    return pst.convert(model, torch.optim.SGD(model.parameters(), 0.01))


def losses(model: Any, opt: Any) -> list[float]:
    """Those of twelve steps over batches of several sizes, of ids that repeat and of others."""
    dice, values = torch.Generator().manual_seed(2), []
    for step in range(12):
        ids = torch.randint(0, 100, (4, 3 if step % 2 else 30), generator=dice)
        opt.zero_grad()
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        opt.step()
        values.append(loss.item())
    return values


@pytest.mark.long
def test_compiled_model(compiler: Any) -> None:
    """A compiled model trains as the model does; only torch's own layers are compiled, once."""
    torch.manual_seed(3)
    plain = Towers()
    moved, opt = trained(copy.deepcopy(plain))
    expected = losses(moved, opt)
    moved, opt = trained(plain)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        actual = losses(torch.compile(moved, backend="eager", dynamic=True), opt)
    assert actual == pytest.approx(expected, rel=1e-5)
    assert [str(each.message) for each in said if "psfleet" in str(each.message)] == []
    assert compiler["stats"]["unique_graphs"] <= 4
    broken = " ".join(compiler["graph_break"])
    assert broken.count("Developer debug context") == broken.count("a graph cannot read")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # that dynamo reads
def test_compiled_features(compiler: Any) -> None:
    """The look-up of a feature set is called between the compiled parts."""
    features = FeatureSet([Feature("user", Table("users", 4, SGD(0.1)))])
    model = torch.nn.Sequential(pst.FeatureEmbedding(features))
    pst.DistributedOptimizer(model)
    run = torch.compile(lambda ids: model({"user": ids})["user"] * 2, backend="eager")
    ids = torch.arange(6)
    assert torch.equal(run(ids), model({"user": ids})["user"] * 2)
    assert compiler["stats"]["unique_graphs"] <= 2


GRAPHS: dict[str, Callable[[Any, Any], Any]] = {
    "export": lambda model, ids: torch.export.export(model, (ids,)).module(),
    "script": lambda model, _: torch.jit.script(model),
    "trace": lambda model, ids: torch.jit.trace(model, (ids,)),
    "fx": lambda model, _: torch.fx.symbolic_trace(model),
}


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_no_graph_of_a_converted_model(kind: str) -> None:
    """A converted model cannot become a graph, and the sentence names its plain copy, which can."""
    model, opt = trained(Towers())
    ids = torch.arange(12).reshape(4, 3)
    with pytest.raises(UsageError, match=r"on the servers.* copy\.deepcopy\(model\)"):
        GRAPHS[kind](model, ids)
    model(ids).sum().backward()
    opt.step()
    if kind != "script":
        assert torch.allclose(GRAPHS[kind](copy.deepcopy(model), ids)(ids), model(ids))
