"""MMoE (Ma et al., KDD 2018): which item will a user click, and which click becomes a purchase?

python examples/models/mmoe.py              # embedded; --plain: in torch alone
psfleet-launch --servers 2 --workers 2 examples/models/mmoe.py

The impressions are made up, see `impressions`.
"""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from harness import ITEMS, USERS, Batch, Options, binary_loss, mlp, print_auc, table
from torch import Tensor, nn

from psfleet.features import Feature, FeatureSet

TASKS = ["click", "buy"]
WIDTH = 16  # of a row


def impressions(count: int, seed: int) -> dict[str, Any]:
    """Return impressions of random users and items; labels [n, 2]: clicked, and bought.

    Users and items have 4 normal values. The product of the first 3 decides a click, that of the last 3 a
    purchase, so the tasks share a part: logits are that - 1, or - 2.
    """
    fixed, dice = np.random.default_rng(0), np.random.default_rng(seed)
    taste, kind = fixed.normal(size=(USERS, 4)), fixed.normal(size=(ITEMS, 4))
    users, items = dice.integers(0, USERS, count), dice.integers(0, ITEMS, count)
    products = taste[users] * kind[items]
    logits = np.stack([products[:, :3].sum(1) - 1, products[:, 1:].sum(1) - 2], 1)
    labels = dice.random((count, 2)) < 1 / (1 + np.exp(-logits))
    return {"user": users + 1, "item": items + 1, "label": labels.astype(np.float32)}


class MMoE(nn.Module):
    """Experts that all tasks share, a gate over them and a tower for each task."""

    def __init__(self, embed: nn.Module, experts: int = 4) -> None:
        super().__init__()
        self.embed = embed
        self.experts = nn.ModuleList(mlp(3 * WIDTH, 64, 32) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(3 * WIDTH, experts) for _ in TASKS)
        self.towers = nn.ModuleList(mlp(32, 16, 1) for _ in TASKS)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits [n, tasks]."""
        values = self.embed(batch)
        both = values["user"], values["item"]
        start = torch.cat([*both, both[0] * both[1]], 1)
        found = torch.stack([expert(start).relu() for expert in self.experts], 1)
        logits = [
            tower((gate(start).softmax(1)[:, :, None] * found).sum(1))
            for gate, tower in zip(self.gates, self.towers, strict=True)
        ]
        return torch.cat(logits, 1)


def main(given: Sequence[str] | None = None) -> dict[str, float]:
    """Train, and print the AUC of both tasks."""
    options = Options.parse(__doc__, 4, given)
    features = FeatureSet([Feature(name, table(f"{name}s", WIDTH)) for name in ("user", "item")])
    model = MMoE(options.embedding(features))
    options.fit(model, impressions(60_000, 1), binary_loss(model))
    return print_auc(model, impressions(20_000, 2), TASKS, options.samples)


if __name__ == "__main__":
    main()
