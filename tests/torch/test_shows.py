"""Shows and clicks of torch embeddings reach the table that counts them."""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from typing import Any

import pytest

from psfleet import optimizer
from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.entry import ShowClickEntry
from psfleet.errors import ShapeError, UsageError
from psfleet.runtime import interface
from psfleet.runtime.interface import Runtime
from psfleet.testing.local_fleet import LocalFleet

pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")

import torch  # after the check for torch

import psfleet.torch as pst
from tests.torch import models  # noqa: F401  # sets torch's threads

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


def test_on_servers() -> None:
    """One value a sample counts for each of its ids but the padding, over several lookups of a step."""
    with LocalFleet(2, 1) as fleet:
        far: Runtime = fleet.connect(0, "async")
        before = interface.use(far)
        rows, opt = made(pst.Embedding, padding_idx=9)
        for _ in range(2):
            rows(IDS, SHOW, CLICK).sum().backward()
            step(rows, opt, torch.tensor([3, 7]))  # nobody says: once and never
        interface.use(before)
        assert counted(rows) == {1: [12, 2], 2: [8, 2], 3: [6, 0], 7: [2, 0], 9: [0, 0]}
        far.close()


def test_bags(fleet: EmbeddedRuntime) -> None:
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
