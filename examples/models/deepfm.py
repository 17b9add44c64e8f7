"""DeepFM (Guo et al., IJCAI 2017), which predicts whether a flight arrives more than 15 minutes late.

python examples/models/deepfm.py            # embedded; --plain: in torch alone
psfleet-launch --servers 2 --workers 2 examples/models/deepfm.py
"""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Sequence

import torch
from harness import DIM, FIELDS, NUMBERS, Batch, mlp, train_on_flights
from torch import Tensor, nn


class DeepFM(nn.Module):
    """A weight for each id, products of factors, and an MLP over factors and numbers."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed
        self.mlp = mlp(len(FIELDS) * DIM + NUMBERS, 64, 64, 1)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits [n, 1]."""
        values = self.embed(batch)
        rows = torch.stack([values[name] for name in FIELDS], 1)
        weights, factors = rows[:, :, :1], rows[:, :, 1:]
        products = factors.sum(1).square() - factors.square().sum(1)
        hidden = torch.cat([factors.flatten(1), values["numbers"]], 1)
        logit: Tensor = weights.sum(1) + products.sum(1, keepdim=True) / 2 + self.mlp(hidden)
        return logit


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train, and print the AUC."""
    return train_on_flights(DeepFM, __doc__, arguments)


if __name__ == "__main__":
    main()
