"""Pipeline: an nn.Sequential in micro-batches, in one process and on stages, with the same bits."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import psfleet.torch as pst
from psfleet.torch.sequential_pipeline import chunks_of
from tests.launch.conftest import Launch, launch
from tests.pipeline.conftest import alone, saved_bits
from tests.runtimes import CountingRuntime
from tests.torch.models import under

__all__ = ["launch"]

SCRIPT = str(Path(__file__).parent / "scripts" / "pipeline.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("cuts", "dtype", "options"),
    [
        ("2,4,9", "bfloat16", ("1f1b", "--servers", "2")),
        pytest.param("9", "", ("gpipe",), marks=pytest.mark.long),
    ],
    ids=["1f1b, autocast", "gpipe"],
)
def test_stages_have_the_bits_of_one_process(
    launch: Launch,
    tmp_path: Path,
    torch_zygote: None,
    cuts: str,
    dtype: str,
    options: tuple[str, ...],
) -> None:
    """Losses, weights, rows, statistics, outputs and tables are the same in both stages and alone.

    The model has dropout, running statistics, rows in two places, modules that pass on two tensors
    and change their input in place, and micro-batches of unequal length. In the first case a stage has two
    pieces and values travel in bfloat16, in the second one the second stage has no parameters.
    """
    out = tmp_path / "out.npz"
    stages = ["--no-progress", "--micro-batches", "4", "--stages", "2", "--pipeline"]
    job = launch(*stages, *options, SCRIPT, str(out), "4", cuts, dtype, **ONE_THREAD)
    code, _, err = job.ends(120)
    assert code == 0, err + job.log("*")
    expected = alone(tmp_path / "alone.npz", SCRIPT, "4", "", dtype)
    assert saved_bits(out) == expected
    assert saved_bits(tmp_path / "out.npz.other.npz") == expected


def mlp() -> nn.Sequential:
    """A small network with dropout."""
    torch.manual_seed(11)
    parts = [[nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.1)] for _ in range(4)]
    return nn.Sequential(*(module for part in parts for module in part), nn.Linear(6, 2))


def train(steps: int = 5, **strategy: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of a Pipeline under a strategy, in this process."""
    under(**strategy)
    model = mlp()
    trainer = pst.Pipeline(model, torch.optim.SGD(model.parameters(), 0.1), nn.functional.mse_loss)
    dice = torch.Generator().manual_seed(2)
    data = [torch.randn(12, 8, generator=dice) for _ in range(steps)]
    losses = [float(trainer.step(x[:, :6], x[:, 6:])) for x in data]
    return losses, trainer.model.state_dict()


def test_one_micro_batch_is_plain_training() -> None:
    """Without a strategy a step is what the loop of plain torch does."""
    model = mlp()
    twin = copy.deepcopy(model)
    for one in (model, twin):
        for module in one:
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    trainer = pst.Pipeline(model, torch.optim.Adam(model.parameters()), nn.functional.mse_loss)
    adam = torch.optim.Adam(twin.parameters())
    for _ in range(20):
        x, y = torch.randn(9, 6), torch.randn(9, 2)
        loss = nn.functional.mse_loss(twin(x), y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        torch.testing.assert_close(trainer.step(x, y), loss.detach(), rtol=1e-5, atol=0)


def test_cuts_schedules_and_recompute_change_no_bit() -> None:
    """Any number of pieces, recomputed or not, gives the bits of the uncut model."""
    expected = train(pipeline={"micro_batches": 3})
    for strategy in (
        {"pipeline": {"micro_batches": 3, "stages": 3}},
        {"pipeline": {"micro_batches": 3, "stages": 2, "schedule": "gpipe"}, "recompute": {}},
        {"pipeline": {"micro_batches": 3}, "recompute": {"checkpoints": ["3", "6"]}},
    ):
        losses, weights = train(**strategy)
        assert losses == expected[0], strategy
        assert all(torch.equal(value, expected[1][name]) for name, value in weights.items())
    other = train(pipeline={"micro_batches": 4})
    assert other[0] != expected[0]  # other masks
    np.testing.assert_allclose(other[0], expected[0], rtol=0.2)


def test_pieces_are_balanced() -> None:
    """Pieces are about equal in work; between equally good cuts the one that sends least is chosen."""
    narrow = nn.Sequential(
        nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 1)
    )
    assert chunks_of(narrow, None, 2, torch.zeros(4, 8)) == [range(2), range(2, 5)]
    heavy = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(8, 8))
    assert chunks_of(heavy, None, 3, torch.zeros(4, 8)) == [range(1), range(1, 2), range(2, 4)]


def test_prefetched_rows_of_micro_batches() -> None:
    """With prefetch() a step is one push and one pull, of all its micro-batches' rows too."""
    curves = []
    for ahead in (False, True):
        under(pipeline={"micro_batches": 4})
        torch.manual_seed(5)
        model = nn.Sequential(nn.EmbeddingBag(50, 4, sparse=True), nn.Linear(4, 1), nn.Flatten(0))
        runtime = CountingRuntime()
        trainer = pst.Pipeline(
            model, torch.optim.SGD(model.parameters(), 0.1), nn.functional.mse_loss, runtime=runtime
        )
        dice = torch.Generator().manual_seed(1)
        data = [(torch.randint(0, 50, (10, 3), generator=dice), torch.ones(10)) for _ in range(3)]
        runtime.calls.clear()
        losses = [float(trainer.step(x, y)) for x, y in (pst.prefetch(data) if ahead else data)]
        curves.append((losses, runtime.calls))
        runtime.close()
    (expected, slow), (actual, fast) = curves
    assert actual == expected
    assert slow == ([("pull", 1)] * 4 + [("push", 3), ("pull", 2)]) * 3
    assert fast == [("pull", 1)] * 4 + [("push", 3), ("pull", 6)] * 2 + [("push", 3), ("pull", 2)]
