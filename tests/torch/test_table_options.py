"""Options of tables under PyTorch's embeddings: their servers, shows and clicks, and rows in 16 bits."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import psfleet.torch as pst
from psfleet import optimizer
from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.engine.schema.entry import ShowClickEntry
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.script_runtime import ScriptRuntime
from psfleet.features import Feature, FeatureSet, Table
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD
from tests.torch import models  # noqa: F401  # sets torch's threads

SIX = torch.arange(6)


def model(servers: int | None) -> torch.nn.ModuleDict:
    """An embedding, a bag and features."""
    features = FeatureSet([Feature("f", Table("features", 5, servers=servers))])
    return torch.nn.ModuleDict(
        {
            "one": pst.Embedding(None, 5, name="one", servers=servers),
            "bag": pst.EmbeddingBag(20, 5, name="bag", servers=servers),
            "features": pst.FeatureEmbedding(features),
        }
    )


def outputs(model: Any) -> list[torch.Tensor]:
    """What the three modules look up of ids 0 to 5."""
    bags, features = model["bag"](SIX.reshape(2, 3)), model["features"]({"f": SIX})
    return [model["one"](SIX), bags, features["f"]]


def train(model: Any, opt: pst.DistributedOptimizer) -> None:
    """Three updates of all looked-up rows towards 1."""
    for _ in range(3):
        loss: Any = sum((each - 1).square().mean() for each in outputs(model))
        loss.backward()
        opt.step()
        opt.zero_grad()


def trained(mode: str, servers: int | None) -> tuple[bytes, list[int]]:
    """Rows after some steps on three servers, and the pushes of each."""
    with LocalFleet(3, 1, in_process=True) as fleet:
        runtime = fleet.connect(0, mode)
        before = current().use(runtime)
        copied_model = copy.deepcopy(model(servers))
        sgd = torch.optim.SGD(copied_model.parameters(), 0.1)
        opt = pst.DistributedOptimizer(copied_model, sgd)
        train(copied_model, opt)
        contents = b"".join(each.detach().numpy().tobytes() for each in outputs(copied_model))
        pushes = [server["pushes"] for server in runtime.stats()]
        current().use(before)
        runtime.close()
    return contents, pushes


def test_embeddings_lie_where_they_are_told() -> None:
    """An embedding, a bag and a feature, also of a copied model: the same bits in sync mode."""
    assert trained("sync", None)[0] == trained("sync", 1)[0]


def test_servers_of_a_converted_model(fleet: EmbeddedRuntime) -> None:
    """`convert(servers=...)` names embeddings by their place, tied ones by any; the rest is on all."""
    plain = torch.nn.ModuleDict(
        {name: torch.nn.Embedding(9, 5, sparse=True) for name in ("a", "b", "c")}
    )
    plain["c"].weight = plain["b"].weight
    pst.convert(plain, torch.optim.SparseAdam(plain.parameters()), servers={"c": 2})
    assert sorted((spec.name, spec.servers) for spec in fleet.specs().values()) == [
        ("a", None),
        ("b", 2),
    ]


ENTRY = ShowClickEntry("show", "click", decay_rate=1.0)
IDS = torch.tensor([[1, 2], [3, 1], [9, 9]])
SHOW, CLICK = torch.tensor([4, 2, 1]), torch.tensor([[1.0], [0.0], [1.0]])


def made(kind: Callable[..., Any], name: str = "t", **options: Any) -> tuple[Any, Any]:
    """A module whose table counts, and its optimizer."""
    rows = kind(None, 2, name=name, entry=ENTRY, optimizer=optimizer.SGD(0.1), **options)
    model = torch.nn.ModuleDict({"rows": rows, "line": torch.nn.Linear(2, 1)})
    return rows, pst.DistributedOptimizer(model, torch.optim.SGD(model["line"].parameters(), 0.1))


def counted(rows: Any) -> dict[int, list[float]]:
    """Shows and clicks by id."""
    state = rows.table.runtime.read_table(rows.table.key)
    return dict(zip(state.ids.tolist(), state.scores.tolist(), strict=True))


def step(rows: Any, opt: Any, *arguments: Any, **named: Any) -> None:
    """One update."""
    rows(*arguments, **named).sum().backward()
    opt.step()
    opt.zero_grad()


def test_shows_on_servers() -> None:
    """One value a sample counts for each of its ids but the padding, over several lookups of a step."""
    with LocalFleet(2, 1, in_process=True) as fleet:
        far: ScriptRuntime = fleet.connect(0, "async")
        before = current().use(far)
        rows, opt = made(pst.Embedding, padding_idx=9)
        for _ in range(2):
            rows(IDS, SHOW, CLICK).sum().backward()
            step(rows, opt, torch.tensor([3, 7]))  # nobody says: once and never
        current().use(before)
        assert counted(rows) == {1: [12, 2], 2: [8, 2], 3: [6, 0], 7: [2, 0], 9: [0, 0]}
        far.close()


def test_shows_of_bags(fleet: EmbeddedRuntime) -> None:
    """By bag or by id, with offsets or in two dimensions."""
    rows, opt = made(pst.EmbeddingBag, mode="sum")
    flat, offsets = torch.tensor([1, 2, 1, 5]), torch.tensor([0, 3])
    step(rows, opt, flat, offsets, shows=torch.tensor([2, 7]), clicks=torch.tensor([1, 0]))
    assert counted(rows) == {1: [4, 2], 2: [2, 1], 5: [7, 0]}
    step(rows, opt, flat, offsets, shows=torch.tensor([1, 1, 1, 3]))
    assert counted(rows) == {1: [6, 2], 2: [3, 1], 5: [10, 0]}
    step(rows, opt, IDS, shows=SHOW, clicks=CLICK)
    assert counted(rows) == {1: [12, 3], 2: [7, 2], 3: [2, 0], 5: [10, 0], 9: [2, 2]}
    closed = torch.tensor([0, 1, 4])
    last, end = made(pst.EmbeddingBag, "u", mode="sum", include_last_offset=True)
    step(last, end, flat, closed, shows=torch.tensor([9, 1]))
    assert counted(last) == {1: [10, 0], 2: [1, 0], 5: [1, 0]}


def test_what_cannot_be_counted(fleet: EmbeddedRuntime) -> None:
    """Shapes that fit neither ids nor samples, and tables that count nothing."""
    bags, _ = made(pst.EmbeddingBag)
    with pytest.raises(ShapeError, match=r"'shows' has shape \(2,\) for ids \(3, 2\)"):
        bags(IDS, shows=torch.tensor([1, 2]))
    with pytest.raises(ShapeError, match=r"'clicks' has shape \(3,\) for 2 bags of 4 ids"):
        bags(IDS.reshape(-1)[:4], torch.tensor([0, 3]), clicks=torch.ones(3))
    plain = pst.Embedding(None, 2, name="p", optimizer=optimizer.SGD(0.1))
    with pytest.raises(UsageError, match="'p' counts no shows and clicks"):
        plain(IDS, shows=SHOW)


def test_rows_in_16_bits(fleet: EmbeddedRuntime) -> None:
    """`precision=` is the table's, of embeddings with and without an optimizer of their own, a bag and a
    feature; a copy of the model keeps it."""
    features = FeatureSet([Feature("f", Table("features", 16, precision="bfloat16"))])
    model = torch.nn.ModuleDict(
        {
            "one": pst.Embedding(None, 16, name="one", precision="bfloat16"),
            "own": pst.Embedding(None, 16, name="own", optimizer=SGD(0.5), precision="bfloat16"),
            "bag": pst.EmbeddingBag(20, 16, name="bag", precision="bfloat16"),
            "features": pst.FeatureEmbedding(features),
        }
    )
    model = copy.deepcopy(model)
    opt = pst.DistributedOptimizer(model, torch.optim.SGD(model.parameters(), 0.1))
    train(model, opt)
    specs = fleet.specs().values()
    assert {spec.name: spec.precision for spec in specs} == dict.fromkeys(
        ("one", "own", "bag", "features"), "bfloat16"
    )
    bits = model["one"](SIX).detach().numpy().view(np.uint32)
    assert bits.any()
    assert not (bits & np.uint32(0xFFFF)).any()
