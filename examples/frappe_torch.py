"""The models of frappe.py in PyTorch."""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

import itertools

import numpy as np
import torch
from frappe import Settings
from frappe_data import FIELDS, Samples
from numpy.typing import NDArray
from torch import Tensor, nn

import psfleet.torch as pst

Floats = NDArray[np.float32]


class DeepFM(nn.Module):
    """What `Settings` leave out is not there."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embed = pst.FeatureEmbedding(settings.features())
        widths = [len(FIELDS) * settings.dim, *settings.hidden]
        self.mlp = nn.Sequential()
        for before, after in itertools.pairwise(widths):
            self.mlp.extend([nn.Linear(before, after), nn.ReLU(), nn.Dropout(settings.dropout)])
        if settings.hidden:
            self.mlp.append(nn.Linear(widths[-1], 1))

    def forward(self, samples: Samples) -> Tensor:
        """The logits, float32 [n]."""
        rows = torch.stack(list(self.embed(samples.batch).values()), 1)
        weights, factors = rows[:, :, 0], rows[:, :, 1:]
        products = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        logit: Tensor = weights.sum(1) + products
        return logit + self.mlp(factors.flatten(1))[:, 0] if len(self.mlp) else logit


class TorchModel:
    """Trains a DeepFM, an FM or a linear model."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(1)
        self.model = DeepFM(settings)
        dense = list(self.model.mlp.parameters())
        local = torch.optim.Adam(dense, settings.rate) if dense else None
        self.optimizer = pst.DistributedOptimizer(self.model, local)
        self.loss = nn.BCEWithLogitsLoss()

    def step(self, samples: Samples) -> Floats:
        """Train on these samples; their probabilities before that, float32 [n]."""
        logit = self.model.train()(samples)
        self.loss(logit, torch.from_numpy(samples.labels)).backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        return _probabilities(logit)

    def predict(self, samples: Samples) -> Floats:
        """Probabilities, float32 [n]."""
        with torch.no_grad():
            return _probabilities(self.model.eval()(samples))


def _probabilities(logit: Tensor) -> Floats:
    found: Floats = logit.detach().sigmoid().numpy()
    return found
