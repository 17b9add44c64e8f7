"""Predicts which app a user will open: LR, FM and DeepFM on the Frappe log, in a program or in PyTorch.

    python examples/frappe.py --model fm                                               # embedded
    psfleet-launch --servers 2 --workers 2 --sync examples/frappe.py --model deepfm    # a cluster
    psfleet-launch --servers 2 --workers 2 --wire int8 examples/frappe.py --torch      # PyTorch, async

docs/proofs.md compares the AUC of all these models with the published one.
"""

import argparse
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import frappe_data
import numpy as np
from frappe_data import FIELDS, IDS, Samples
from numpy.typing import NDArray

import psfleet as ps
from psfleet import UsageError, fleet, initializer, layers, metrics, optimizer, regularizer
from psfleet.features import Feature, FeatureSet, Table, feed


@dataclass(frozen=True)
class Settings:
    """Settings of a model. The values in MODELS are the best of a few on the validation samples.

    Attributes:
        dim: Width of a factor. 0 makes a linear model.
        hidden: Widths of the hidden layers over the factors. Empty means no network.
        epochs: Number of passes over the training samples.
        batch: Number of samples of a step of all workers together.
        rate: Learning rate of Adam.
        falls: Number of epochs after which the rate is divided by ten. 0 keeps it constant.
        dense: If True, all rows are one dense parameter, so that each step applies the L2 penalty to all of
            them. If False, they are rows of features, and the penalty applies to the rows that the step uses.
        decay: L2 penalty on the rows.
        dropout: Fraction of the hidden values that a training step leaves out.
        normalised: True to normalise hidden values by their batch.
    """

    dim: int = 0
    hidden: tuple[int, ...] = ()
    epochs: int = 20
    batch: int = 1024
    rate: float = 0.01
    falls: int = 0
    dense: bool = False
    decay: float = 0.0
    dropout: float = 0.0
    normalised: bool = False

    def milestones(self, samples: int) -> list[int]:
        """Return the steps of a worker after which the learning rate is divided by ten."""
        return [self.falls * samples // self.batch] if self.falls else []

    def features(self, rate: float | optimizer.lr.LRScheduler) -> FeatureSet:
        """Return a feature for each field.

        All use one table whose rows have a weight and `dim` values of a factor.
        """
        adam = optimizer.Adam(rate, weight_decay=self.decay)
        rows = Table("rows", 1 + self.dim, adam, initializer.Normal(scale=0.01, seed=1))
        return FeatureSet([Feature(name, rows) for name in FIELDS])

    def parameter(self, ids: ps.Variable) -> ps.Variable:
        """Look up the rows of these ids, [n, fields, 1 + dim], in one dense parameter."""
        start = initializer.Normal(scale=0.01, seed=1)
        attr = ps.ParamAttr("rows", start, regularizer=regularizer.L2Decay(self.decay))
        return layers.embedding(ids, [IDS, 1 + self.dim], param_attr=attr)


MODELS = {
    "lr": Settings(epochs=8),
    "fm": Settings(dim=16, epochs=8, decay=1e-5),
    "deepfm": Settings(
        dim=10,
        hidden=(400, 400, 400),
        epochs=13,
        batch=4096,
        rate=0.001,
        falls=9,
        dense=True,
        decay=0.05,
        dropout=0.2,
        normalised=True,
    ),
}


class Model(Protocol):
    """Model that trains and predicts."""

    def step(self, samples: Samples) -> NDArray[np.float32]:
        """Train on these samples. Returns their probabilities before the update, float32 [n]."""

    def predict(self, samples: Samples) -> NDArray[np.float32]:
        """Return probabilities, float32 [n]."""


class ProgramModel:
    """A weight for each id, products of factors (Rendle, 2010), and a network over factors (Guo, 2017)."""

    def __init__(self, settings: Settings, samples: int) -> None:
        self.rates = optimizer.lr.MultiStepDecay(settings.rate, settings.milestones(samples))
        self.features = None if settings.dense else settings.features(self.rates)
        self.program = ps.Program(random_seed=1)
        with ps.program_guard(self.program):
            if self.features:
                rows = layers.stack(list(layers.features(self.features).values()), axis=1)
            else:
                rows = settings.parameter(layers.data("ids", [None, len(FIELDS)], "int64"))
            label = layers.data("label", [None, 1])
            logit = layers.reduce_sum(layers.slice(rows, [2], [0], [1]), dim=1)
            if settings.dim:
                factors = layers.slice(rows, [2], [1], [1 + settings.dim])
                total = layers.square(layers.reduce_sum(factors, dim=1))
                products = total - layers.reduce_sum(layers.square(factors), dim=1)
                logit = logit + layers.reduce_sum(products, dim=1, keep_dim=True) * 0.5
            if settings.hidden:
                hidden = layers.reshape(factors, [-1, len(FIELDS) * settings.dim])
                for width in settings.hidden:
                    hidden = layers.fc(hidden, width)
                    if settings.normalised:
                        hidden = layers.batch_norm(hidden)
                    hidden = layers.dropout(
                        layers.relu(hidden),
                        settings.dropout,
                        dropout_implementation="upscale_in_train",
                    )
                logit = logit + layers.fc(hidden, 1)
            self.loss = layers.mean(layers.sigmoid_cross_entropy_with_logits(logit, label))
            self.probability = layers.sigmoid(logit)
            self.test_program = self.program.clone(for_test=True)
            fleet.distributed_optimizer(optimizer.Adam(self.rates)).minimize(self.loss)
        self.executor = ps.Executor()

    def step(self, samples: Samples) -> NDArray[np.float32]:
        probabilities = self._run(self.program, samples)
        self.rates.step()
        return probabilities

    def predict(self, samples: Samples) -> NDArray[np.float32]:
        return self._run(self.test_program, samples)

    def _run(self, program: ps.Program, samples: Samples) -> NDArray[np.float32]:
        ids = feed(self.features, samples.batch) if self.features else {"ids": samples.ids}
        inputs = {**ids, "label": samples.labels[:, None]}
        (outputs,) = self.executor.run(program, inputs, [self.probability])
        probabilities: NDArray[np.float32] = outputs[:, 0]
        return probabilities


def torch_model(settings: Settings, samples: int) -> Model:
    """Return the same model in PyTorch."""
    from frappe_torch import TorchModel

    return TorchModel(settings, samples)


def train(model: Model, samples: Samples, settings: Settings) -> float:
    """Train the model. Returns the samples per second of all workers together."""
    began = time.perf_counter()
    size = settings.batch // fleet.worker_num()
    for rows in fleet.dataset(len(samples), size, settings.epochs, shuffle_seed=1):
        model.step(samples[rows])
    fleet.barrier_worker()
    return settings.epochs * len(samples) / (time.perf_counter() - began)


def score(model: Model, parts: dict[str, Samples]) -> dict[str, float]:
    """Return AUC and log loss of each part. The workers share the work."""
    counted = {name: [metrics.Auc(spacing="logit"), metrics.LogLoss()] for name in parts}
    scores = fleet.metrics(counted)
    for name, samples in parts.items():
        for rows in fleet.shard(np.array_split(np.arange(len(samples)), len(samples) // 4096 + 1)):
            scores.update(model.predict(samples[rows]), samples.labels[rows], task=name)
    scores.publish()
    fleet.barrier_worker()
    return scores.read().run


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="deepfm")
    parser.add_argument("--torch", action="store_true", help="in PyTorch")
    parser.add_argument(
        "--data", type=Path, default=Path(".data/frappe"), help="folder of the files"
    )
    parser.add_argument("--any-data", action="store_true", help="take files with another checksum")
    parser.add_argument("--epochs", type=int, help="passes over the training samples")
    parser.add_argument("--out", type=Path, help="folder for the trained model")
    return parser.parse_args()


def main() -> None:
    """Train, and print the scores."""
    options = parse()
    try:
        data = frappe_data.load(options.data, is_checked=not options.any_data)
    except UsageError as error:
        raise SystemExit(f"frappe.py: {error}") from None
    fleet.init(strategy=fleet.DistributedStrategy(a_sync=True))  # the launcher's flags win
    settings = MODELS[options.model]
    settings = dataclasses.replace(settings, epochs=options.epochs or settings.epochs)
    model = (torch_model if options.torch else ProgramModel)(settings, len(data.train))
    pace = train(model, data.train, settings)
    results = score(model, {"validation": data.validation, "test": data.test})
    for name in ("validation", "test"):
        auc, loss = results[f"{name}/auc"], results[f"{name}/log_loss"]
        fleet.util.print_on_rank(f"{name} AUC {auc:.4f}   log loss {loss:.4f}", 0)
    fleet.util.print_on_rank(f"{pace:,.0f} samples/s", 0)
    if options.out:
        fleet.save_persistables(str(options.out))
    fleet.stop_worker()


if __name__ == "__main__":
    main()
