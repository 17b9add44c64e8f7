"""Trains a program, a torch model and plain tables in turn; worker 0 evaluates each half-way.

evaluating.py OUT.npz FOLDER WHAT

WHAT: "train": nothing is evaluated. "evaluate": FOLDER gets the snapshots. "check": no training; the models
load these snapshots and predict as in a step.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import psfleet
import psfleet.torch as pst
from psfleet import fleet, layers, metrics, optimizer
from psfleet.core.runtime.process_runtime import active
from psfleet.serving.prediction import CutEvaluation

STEPS, HALF, ROWS = 6, 3, 40
torch.set_num_threads(1)


def batch(*seed: int) -> tuple[Any, Any]:
    """ids int64 [16, 3] and labels float32 [16, 1]; some ids are in no other batch."""
    dice = np.random.default_rng(seed)
    ids = dice.integers(0, ROWS, (16, 3))
    return ids, (ids.sum(1, keepdims=True) % 2).astype(np.float32)


TESTS = [batch(99, number) for number in range(4)]


class OfProgram:
    """Embeddings for any id, batch_norm and dropout."""

    def __init__(self) -> None:
        self.program = psfleet.Program()
        with psfleet.program_guard(self.program, psfleet.Program()):
            ids = layers.data("ids", [None, 3], dtype="int64")
            label = layers.data("label", [None, 1])
            rows = layers.embedding(ids, size=[None, 5], is_distributed=True, name="program_rows")
            hidden = layers.batch_norm(layers.reshape(rows, [-1, 15]), name="program_norm")
            logit = layers.fc(layers.dropout(hidden, 0.5), 1, name="program_fc")
            self.chance = layers.sigmoid(logit)
            loss = layers.mean(layers.sigmoid_cross_entropy_with_logits(logit, label))
            fleet.distributed_optimizer(optimizer.Adam(0.05)).minimize(loss)
        self.executor = psfleet.Executor()

    def step(self, ids: Any, label: Any) -> None:
        self.executor.run(self.program, feed={"ids": ids, "label": label})

    def evaluate(self, **options: Any) -> CutEvaluation:
        batches = [({"ids": ids, "label": label}, label) for ids, label in TESTS]
        return fleet.evaluate(self.chance, batches, **options)

    def predict(self, ids: Any) -> Any:
        test = self.program.clone(for_test=True)
        return self.executor.run(test, feed={"ids": ids}, fetch_list=[self.chance])[0]


class Net(nn.Module):
    """A table for any id with its own optimizer, an embedding of torch, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own = pst.Embedding(None, 5, name="torch_rows", optimizer=optimizer.Adagrad(0.1))
        self.rows = nn.Embedding(ROWS, 5, sparse=True)
        self.linear = nn.Linear(30, 1)

    def forward(self, ids: torch.Tensor) -> Any:
        rows = torch.cat([self.own(ids), self.rows(ids)], dim=2)
        return torch.sigmoid(self.linear(rows.flatten(1)))


class OfTorch:
    """A converted module."""

    def __init__(self) -> None:
        model: Any = Net()
        dense = torch.optim.Adam(model.linear.parameters(), 0.05)
        self.model, self.opt = pst.convert(
            model, (torch.optim.SparseAdam([model.rows.weight], 0.05), dense)
        )

    def step(self, ids: Any, label: Any) -> None:
        loss: Any = nn.functional.binary_cross_entropy(
            self.model(torch.from_numpy(ids)), torch.from_numpy(label)
        )
        loss.backward()
        self.opt.step()
        self.opt.clear_grad()

    def evaluate(self, **options: Any) -> CutEvaluation:
        batches = [(torch.from_numpy(ids), label) for ids, label in TESTS]
        return fleet.evaluate(self.model, batches, **options)

    def predict(self, ids: Any) -> Any:
        self.opt.refresh()
        with torch.no_grad():
            return self.model.eval()(torch.from_numpy(ids)).numpy()


class OfClient:
    """Logistic regression by hand."""

    def __init__(self) -> None:
        self.client = psfleet.connect()
        self.rows = self.client.sparse_table("client_rows", 1, optimizer.Adagrad(0.1))
        self.bias = self.client.dense_table("client_bias", np.zeros(1), optimizer.SGD(0.1))

    @staticmethod
    def chance(tables: psfleet.Client, ids: Any) -> Any:
        """Through tables that are opened to be read."""
        rows, bias = tables.sparse_table("client_rows"), tables.dense_table("client_bias")
        found = tables.pull({rows: ids, bias: None})
        return 1 / (1 + np.exp(-(found[rows].sum(1) + found[bias])))

    def step(self, ids: Any, label: Any) -> None:
        slope = (self.chance(self.client, ids) - label) / len(ids)
        rows = np.repeat(slope, 3, axis=1).reshape(-1, 1)
        self.client.push({self.rows: (ids.reshape(-1), rows), self.bias: slope.sum(0)})

    def evaluate(self, **options: Any) -> CutEvaluation:
        return self.client.evaluate(self.chance, TESTS, **options)

    def predict(self, ids: Any) -> Any:
        return self.chance(self.client, ids)


WAYS = {"program": OfProgram, "torch": OfTorch, "client": OfClient}


def wanted() -> list[metrics.Metric]:
    """What is computed."""
    return [metrics.Auc(), metrics.LogLoss()]


def train(model: Any, folder: Path | None) -> dict[str, float]:
    """What is evaluated half-way, while the other half goes on."""
    evaluation: CutEvaluation | None = None
    for step in range(STEPS):
        if step == HALF and folder is not None and fleet.is_first_worker():
            evaluation = model.evaluate(metrics=wanted(), folder=folder)
        model.step(*batch(fleet.worker_index(), step))
    return evaluation.result() if evaluation is not None else {}


def check(model: Any, name: str, folder: Path) -> dict[str, float]:
    """The metrics of the model's own forward pass with the values of the snapshot."""
    fleet.load_model(str(folder))
    scores = fleet.metrics(wanted(), name)
    for ids, label in TESTS:
        scores.update(model.predict(ids), label)
    scores.publish()
    return scores.read().run


def main(out: str, folder: Path, what: str) -> None:
    """Save the metrics, and after training all tables."""
    fleet.init()
    figures: dict[str, Any] = {}
    for name, kind in WAYS.items():
        model, place = kind(), folder / name
        if what == "check":
            scores = check(model, name, place)
        else:
            scores = train(model, place if what == "evaluate" else None)
        figures |= {f"{name} {metric}": value for metric, value in scores.items()}
    runtime = active()
    runtime.flush()
    runtime.barrier()
    if fleet.is_first_worker():
        for key, spec in runtime.specs().items():
            for slot, values in zip(spec.slot_names, runtime.read_table(key).values, strict=True):
                figures[f"table {spec.name} {slot}"] = values
        np.savez(out, **figures)
    runtime.barrier()
    fleet.stop_worker()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
