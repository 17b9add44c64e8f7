"""The models of frappe.py in PyTorch."""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

import itertools

import numpy as np
import torch
from frappe import Settings
from frappe_data import FIELDS, IDS, Samples
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler as TorchScheduler
from torch.optim.lr_scheduler import MultiStepLR

import psfleet.torch as pst
from psfleet.optimizer.lr import LRScheduler, MultiStepDecay

Floats = NDArray[np.float32]


class FeatureRows(nn.Module):
    """Rows of a sample's fields, [n, fields, 1 + dim], from a sparse table of features."""

    def __init__(self, settings: Settings, rate: LRScheduler) -> None:
        super().__init__()
        self.features = pst.FeatureEmbedding(settings.features(rate))

    def forward(self, samples: Samples) -> Tensor:
        """Return the rows."""
        return torch.stack(list(self.features(samples.batch).values()), 1)


class DenseRows(nn.Module):
    """Rows of a sample's fields, [n, fields, 1 + dim], from one dense parameter."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embed = nn.Embedding(IDS, 1 + settings.dim)
        nn.init.normal_(self.embed.weight, std=0.01)

    def forward(self, samples: Samples) -> Tensor:
        """Return the rows."""
        rows: Tensor = self.embed(torch.from_numpy(samples.ids))
        return rows


class DeepFM(nn.Module):
    """DeepFM. Without hidden layers in `Settings` it is an FM, and without factors a linear model."""

    def __init__(self, settings: Settings, rate: LRScheduler) -> None:
        super().__init__()
        self.rows = DenseRows(settings) if settings.dense else FeatureRows(settings, rate)
        widths = [len(FIELDS) * settings.dim, *settings.hidden]
        self.mlp = nn.Sequential()
        for before, after in itertools.pairwise(widths):
            self.mlp.append(nn.Linear(before, after))
            if settings.normalised:
                self.mlp.append(nn.BatchNorm1d(after))
            self.mlp.extend([nn.ReLU(), nn.Dropout(settings.dropout)])
        if settings.hidden:
            self.mlp.append(nn.Linear(widths[-1], 1))

    def forward(self, samples: Samples) -> Tensor:
        """Return the logits, float32 [n]."""
        rows = self.rows(samples)
        weights, factors = rows[:, :, 0], rows[:, :, 1:]
        products = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        logit: Tensor = weights.sum(1) + products
        return logit + self.mlp(factors.flatten(1))[:, 0] if len(self.mlp) else logit


class TorchModel:
    """Trains a DeepFM, an FM or a linear model, depending on `Settings`."""

    def __init__(self, settings: Settings, samples: int) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(1)
        milestones = settings.milestones(samples)
        rates = MultiStepDecay(settings.rate, milestones)
        self.model = DeepFM(settings, rates)
        self.schedules: list[LRScheduler | TorchScheduler] = [rates]
        rows, network = list(self.model.rows.parameters()), list(self.model.mlp.parameters())
        parts = ((rows, settings.decay), (network, 0.0))
        groups = [{"params": part, "weight_decay": decay} for part, decay in parts if part]
        local = torch.optim.Adam(groups, settings.rate) if groups else None
        if local:
            self.schedules.append(MultiStepLR(local, milestones))
        self.optimizer = pst.DistributedOptimizer(self.model, local)
        self.loss = nn.BCEWithLogitsLoss()

    def step(self, samples: Samples) -> Floats:
        """Train on these samples. Returns their probabilities before the update, float32 [n]."""
        logit = self.model.train()(samples)
        self.loss(logit, torch.from_numpy(samples.labels)).backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        for schedule in self.schedules:
            schedule.step()
        return _probabilities(logit)

    def predict(self, samples: Samples) -> Floats:
        """Return probabilities, float32 [n]."""
        with torch.no_grad():
            return _probabilities(self.model.eval()(samples))


def _probabilities(logit: Tensor) -> Floats:
    probabilities: Floats = logit.detach().sigmoid().numpy()
    return probabilities
