"""DLRM (Naumov et al., arXiv:1906.00091), which predicts whether a flight arrives more than 15 minutes late.

python examples/models/dlrm.py              # embedded; --plain: in torch alone
psfleet-launch --servers 2 --workers 2 examples/models/dlrm.py
"""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Sequence

import torch
from harness import DIM, FIELDS, NUMBERS, Batch, mlp, train_on_flights
from torch import Tensor, nn

WIDTH = 1 + DIM  # of a row


class DLRM(nn.Module):
    """A bottom MLP turns the numbers into a vector.

    A top MLP takes it and the products of all pairs of vectors.
    """

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed
        vectors = len(FIELDS) + 1
        self.bottom = mlp(NUMBERS, 64, WIDTH)
        self.top = mlp(WIDTH + vectors * (vectors - 1) // 2, 64, 64, 1)
        self.pairs = torch.tril_indices(vectors, vectors, offset=-1)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits [n, 1]."""
        values = self.embed(batch)
        dense = self.bottom(values["numbers"])
        vectors = torch.stack([dense, *(values[name] for name in FIELDS)], 1)
        first, second = self.pairs
        products = (vectors @ vectors.transpose(1, 2))[:, first, second]
        logit: Tensor = self.top(torch.cat([dense, products], 1))
        return logit


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train, and print the AUC."""
    return train_on_flights(DLRM, __doc__, arguments)


if __name__ == "__main__":
    main()
