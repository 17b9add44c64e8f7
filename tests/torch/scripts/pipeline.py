"""Trains an nn.Sequential with all that stages must carry, and saves losses, weights and outputs.

Arguments: where to save, the number of steps, where to cut ("" or "2,5"), and perhaps the dtype of autocast.
"""

import sys

import numpy as np
import torch
from torch import Tensor, nn

import psfleet.torch as pst
from psfleet import fleet
from psfleet.core.runtime.process_runtime import active

ROWS = 40


class Skip(nn.Module):
    """Gives its input beside what it makes of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.inner(x)


class Join(nn.Module):
    """Takes both; has a table of rows of its own, looked up by what is computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(2, width, sparse=True)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        first, second = pair
        rows: Tensor = self.rows((second.sum(1) > 0).long())
        return first + second.tanh() + rows


def build() -> nn.Sequential:
    """Rows, dropout, running statistics, a tuple between modules, one module without parameters at an end."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.EmbeddingBag(ROWS, 16, mode="sum", sparse=True),
        nn.Linear(16, 16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.BatchNorm1d(16),
        Skip(16),
        Join(16),
        nn.Dropout(0.2),
        nn.Linear(16, 1),
        nn.Flatten(0),
    )


def main(out: str, steps: int, cuts: str, dtype: str = "") -> None:
    """Train."""
    torch.set_num_threads(1)
    fleet.init()
    model = build()
    rows = [model.get_parameter("0.weight"), model.get_parameter("6.rows.weight")]
    known = {id(p) for p in rows}
    dense = [p for p in model.parameters() if id(p) not in known]
    trainer = pst.Pipeline(
        model,
        (torch.optim.SparseAdam(rows, 0.02), torch.optim.Adam(dense, 0.01)),
        nn.functional.binary_cross_entropy_with_logits,
        cuts=[int(cut) for cut in cuts.split(",")] if cuts else None,
    )
    dice = torch.Generator().manual_seed(100 + fleet.worker_index())
    rate = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.9)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, ROWS, (22, 3), generator=dice)
        with torch.autocast("cpu", getattr(torch, dtype or "bfloat16"), enabled=bool(dtype)):
            losses.append(float(trainer.step(ids, (ids[:, 0] % 2).float())))
        rate.step()
    fleet.barrier_worker()
    with torch.no_grad():
        seen = trainer.model.eval()(torch.arange(ROWS)[:, None])
    state = trainer.model.state_dict()
    tables = np.array(sorted(spec.name for spec in active().specs().values()))
    name = out + ("" if fleet.is_first_worker() else ".other")
    weights = {key: value.numpy() for key, value in state.items()}
    np.savez(name, losses=np.array(losses), seen=seen, tables=tables, **weights)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
