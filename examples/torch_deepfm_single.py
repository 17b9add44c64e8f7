"""Predicts whether a flight arrives more than 15 minutes late: DeepFM in plain PyTorch, in one process.

    python examples/torch_deepfm_single.py

torch_deepfm.py is the same model on a fleet. docs/torch.md shows the few lines that differ.
"""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

import argparse

import flights_data
import torch
from flights_data import FIELDS, NUMBERS, Flights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from psfleet import metrics

ROWS, DIM = 2**17, 8


class DeepFM(nn.Module):
    """A weight for each id, products of embeddings, and an MLP over embeddings and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(ROWS, 1, mode="sum", sparse=True)
        self.deep = nn.Embedding(ROWS, DIM, sparse=True)
        self.mlp = nn.Sequential(
            nn.Linear(len(FIELDS) * DIM + len(NUMBERS), 64), nn.ReLU(), nn.Linear(64, 1)
        )
        nn.init.zeros_(self.wide.weight)
        nn.init.uniform_(self.deep.weight, -0.01, 0.01)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Return the logit of being late, float32 [n, 1]."""
        factors = self.deep(ids)
        products = (factors.sum(1).square() - factors.square().sum(1)).sum(1, keepdim=True) / 2
        hidden = torch.cat([factors.flatten(1), numbers], 1)
        logit: Tensor = self.wide(ids) + products + self.mlp(hidden)
        return logit


def tensors(flights: Flights, months: range, most: int | None = None) -> TensorDataset:
    """Return the flights of these months, with ids reduced modulo ROWS."""
    chosen = torch.randperm(len(rows := flights.rows(months)))[:most].numpy()
    part = rows[chosen]
    return TensorDataset(
        torch.from_numpy(flights.ids[part]) % ROWS,
        torch.from_numpy(flights.numbers[part]),
        torch.from_numpy(flights.late[part]),
    )


def main() -> None:
    """Train on January to September, and print the scores on November and December."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flights", type=int, metavar="N", help="train on N flights only")
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    flights = flights_data.load().ranked(range(1, 10))
    loader = DataLoader(tensors(flights, range(1, 10), options.flights), batch_size=256)
    model = DeepFM()
    tables = [model.wide.weight, model.deep.weight]
    sparse, dense = torch.optim.SparseAdam(tables), torch.optim.Adam(model.mlp.parameters())

    for ids, numbers, late in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids, numbers), late)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()

    ids, numbers, late = tensors(flights, range(11, 13)).tensors
    with torch.no_grad():
        found = model.eval()(ids, numbers).sigmoid()
    print(
        f"November and December   AUC {metrics.auc(late.numpy(), found.numpy()):.4f}   "
        f"log loss {metrics.log_loss(late.numpy(), found.numpy()):.4f}"
    )


if __name__ == "__main__":
    main()
