"""MMoE (Ma et al., KDD 2018): which impression is clicked, and which one is bought?

python examples/models/mmoe.py                  # embedded; --plain: in torch alone
python examples/models/mmoe.py --shared-bottom  # one bottom of as many units for both tasks
psfleet-launch --servers 2 --workers 2 examples/models/mmoe.py

The impressions are made up, see `impressions`.
"""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from harness import Batch, Options, binary_loss, mlp, print_auc, table
from torch import Tensor, nn

from psfleet.features import Feature, FeatureSet

TASKS = ["click", "buy"]
FIELDS, VALUES = [f"field{number}" for number in range(8)], 50
CORRELATION = 0.0  # of the tasks
WIDTH, EXPERTS, HIDDEN, OUT = 2, 8, 16, 8  # of a row; of the experts


def impressions(count: int, seed: int) -> dict[str, Any]:
    """Return impressions with an id in each field; labels [n, 2]: clicked, and bought.

    After section 3.2 of the paper: each task has a normal weight for each id, and the weights of both tasks
    have the correlation. A sum s of weights makes the logit 3 (s + sin(a1 s + b1) + ... + sin(a4 s + b4)).
    """
    fixed, dice = np.random.default_rng(0), np.random.default_rng(seed)
    first, second = fixed.normal(size=(2, len(FIELDS), VALUES)) / len(FIELDS) ** 0.5
    weights = np.stack([first, CORRELATION * first + (1 - CORRELATION**2) ** 0.5 * second])
    waves = fixed.uniform(1, 6, (4, 1, 1)), fixed.uniform(0, 2 * np.pi, (4, 1, 1))
    ids = dice.integers(0, VALUES, (count, len(FIELDS)))
    sums = weights[:, np.arange(len(FIELDS)), ids].sum(2).T
    logits = 3 * (sums + np.sin(waves[0] * sums + waves[1]).sum(0))
    labels = dice.random((count, 2)) < 1 / (1 + np.exp(-logits))
    named = {name: ids[:, at] + 1 for at, name in enumerate(FIELDS)}
    return {**named, "label": labels.astype(np.float32)}


class MMoE(nn.Module):
    """Experts that all tasks share, a gate over them and a tower for each task.

    Args:
        embed: Look-ups.
        experts: Number of experts; 1: a shared bottom.
        times: Factor of the experts' widths.
    """

    def __init__(self, embed: nn.Module, experts: int = EXPERTS, times: int = 1) -> None:
        super().__init__()
        self.embed = embed
        width, out = len(FIELDS) * WIDTH, OUT * times
        self.experts = nn.ModuleList(mlp(width, HIDDEN * times, out) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in TASKS)
        self.towers = nn.ModuleList(mlp(out, 8, 1) for _ in TASKS)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits [n, tasks]."""
        values = self.embed(batch)
        start = torch.cat([values[name] for name in FIELDS], 1)
        found = torch.stack([expert(start).relu() for expert in self.experts], 1)
        logits = [
            tower((gate(start).softmax(1)[:, :, None] * found).sum(1))
            for gate, tower in zip(self.gates, self.towers, strict=True)
        ]
        return torch.cat(logits, 1)


def main(given: Sequence[str] | None = None) -> dict[str, float]:
    """Train, and print the AUC of both tasks."""
    options = Options.parse(__doc__, 8, given, "--shared-bottom")
    features = FeatureSet(Feature(name, table(name, WIDTH)) for name in FIELDS)
    sizes = (1, EXPERTS) if options.shared_bottom else (EXPERTS, 1)
    model = MMoE(options.embedding(features), *sizes)
    options.fit(model, impressions(60_000, 1), binary_loss(model))
    return print_auc(model, impressions(20_000, 2), TASKS, options.samples)


if __name__ == "__main__":
    main()
