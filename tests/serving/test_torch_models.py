"""PyTorch modules that predict: torch's own results, without what only training needs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import psfleet
from psfleet import fleet, serving
from psfleet.core.base.errors import IdError

pytest.importorskip("torch", reason="torch is not installed")

if TYPE_CHECKING:
    import torch
    from torch import nn

ROWS = 50
BATCH = {"ids": np.arange(24).reshape(8, 3) % 20, "starts": np.arange(0, 24, 3)}


def build() -> "nn.Module":
    """Bags of each kind, a layer with a hook, one that counts its calls, and one with an activation."""
    import torch
    from torch import nn

    class Counting(nn.Module):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, values: "torch.Tensor") -> "torch.Tensor":
            self.calls = self.calls + 1
            return values * self.calls

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList(
                nn.EmbeddingBag(ROWS, 4, mode=mode, sparse=True) for mode in ("sum", "mean")
            )
            self.padded = nn.EmbeddingBag(ROWS, 4, padding_idx=1, sparse=True)
            self.layer = nn.Sequential(nn.Linear(16, 2), nn.ReLU(), Counting())
            self.layer[0].register_forward_hook(lambda module, given, made: made + 1)

        def forward(self, batch: Any) -> "torch.Tensor":
            ids, starts = (torch.as_tensor(batch[name]) for name in ("ids", "starts"))
            inputs = [bag(ids) for bag in self.bags] + [self.padded(ids)]
            inputs.append(self.bags[0](ids.reshape(-1), starts))
            output: torch.Tensor = self.layer(torch.cat(inputs, 1))
            return output

    torch.manual_seed(3)
    return Net()


def test_module_predicts_as_torch(tmp_path: Path) -> None:
    """Bags, hooks and buffers give torch's bits, call after call; an id beyond the rows is refused."""
    import torch

    import psfleet.torch as pst

    psfleet.reset()
    fleet.init()
    trained = build()
    pst.convert(trained, torch.optim.SGD(trained.parameters(), 0.1))
    fleet.save_persistables(str(tmp_path / "snapshot"))
    psfleet.reset()
    plain = build().eval()
    model = serving.load("tests.serving.test_torch_models:build", checkpoint=tmp_path / "snapshot")
    for _ in range(3):
        with torch.inference_mode():
            expected = plain(BATCH).numpy()
        assert (model(BATCH) == expected).all()
    for wrong in (ROWS, -1):
        with pytest.raises(IdError, match=f"id {wrong} is not one"):
            model({**BATCH, "ids": np.full((8, 3), wrong)})
