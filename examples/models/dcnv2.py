"""DCN-V2 (Wang et al., WWW 2021), which predicts whether a flight arrives more than 15 minutes late.

python examples/models/dcnv2.py             # embedded; --plain: in torch alone
psfleet-launch --servers 2 --workers 2 examples/models/dcnv2.py
"""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Sequence

import torch
from harness import DIM, FIELDS, NUMBERS, Batch, mlp, train_on_flights
from torch import Tensor, nn


class DCNv2(nn.Module):
    """Three low-rank cross layers, x <- x0 * (U V x + b) + x, and an MLP in parallel."""

    def __init__(self, embed: nn.Module, layers: int = 3, rank: int = 16) -> None:
        super().__init__()
        self.embed = embed
        width = len(FIELDS) * (1 + DIM) + NUMBERS
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))
        self.deep = mlp(width, 64, 64)
        self.out = nn.Linear(width + 64, 1)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits [n, 1]."""
        values = self.embed(batch)
        start = crossed = torch.cat([*(values[name] for name in FIELDS), values["numbers"]], 1)
        for down, up in zip(self.down, self.up, strict=True):
            crossed = start * up(down(crossed)) + crossed
        logit: Tensor = self.out(torch.cat([crossed, self.deep(start).relu()], 1))
        return logit


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train, and print the AUC."""
    return train_on_flights(DCNv2, __doc__, arguments)


if __name__ == "__main__":
    main()
