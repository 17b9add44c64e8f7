"""The model of W3 in plain PyTorch."""

import torch
from data import FIELDS, W3_DENSE
from torch import nn

__all__ = ["Ctr"]

DIM, HIDDEN = 16, 400


class Ctr(nn.Module):
    """Click-through model: embeddings of 26 fields and 13 numbers feed an MLP with two hidden layers."""

    def __init__(self, rows: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.rows = nn.Embedding(rows, DIM, sparse=True)
        self.mlp = nn.Sequential(
            nn.Linear(FIELDS * DIM + W3_DENSE, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, ids: torch.Tensor, wind: torch.Tensor) -> torch.Tensor:
        """Return logits [n, 1] of ids [n, 26] and numbers [n, 13]."""
        logits: torch.Tensor = self.mlp(torch.cat([self.rows(ids).flatten(1), wind], 1))
        return logits
