"""A torch model beside the program of predicted_program.py; for test_predict.py.

python predicted.py DATA FOLDER: trains both and saves FOLDER/model and FOLDER/program. What their own forward
passes give for the rows of the files is in FOLDER/expected.npz.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from predicted_program import batches, feature_set, train  # type: ignore[import-not-found]
from torch import nn

import psfleet.torch as pst
from psfleet import fleet
from psfleet.data.parquet import ParquetFiles

torch.set_num_threads(1)
FEATURES = feature_set("torch")


class Net(nn.Module):
    """Takes the features of a batch. Dropout tells training from prediction."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = pst.FeatureEmbedding(FEATURES)
        self.mlp = nn.Sequential(nn.Linear(11, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 1))

    def forward(self, features: dict[str, Any]) -> Any:
        return torch.sigmoid(self.mlp(torch.cat(list(self.embed(features).values()), 1)))


def train_module(data: str) -> Any:
    """The forward pass for all rows."""
    files, model = ParquetFiles(data, FEATURES, ["click"]), Net()
    opt = pst.DistributedOptimizer(model, torch.optim.Adam(model.mlp.parameters(), 0.05))
    for rows in batches(files):
        label = torch.from_numpy(rows.labels["click"])[:, None]
        nn.functional.mse_loss(model(rows.features), label).backward()
        opt.step()
        opt.clear_grad()
    with torch.no_grad():
        return np.concatenate([model.eval()(rows.features) for rows in batches(files)])


def main(data: str, folder: Path) -> None:
    """Train on servers or embedded."""
    fleet.init()
    predictions = {"program": train(data, folder), "torch": train_module(data)}
    fleet.save_persistables(str(folder / "model"))
    np.savez(folder / "expected.npz", **predictions)
    fleet.stop_worker()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
