"""Trains one feature set through a program, PyTorch and a client, in turn; worker 0 saves the tables.

interfaces.py OUT.npz
"""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import psfleet
import psfleet.torch as pst
from psfleet import fleet, initializer, layers
from psfleet.core.engine.schema.table import key_of
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.core.runtime.process_runtime import active
from psfleet.features import Feature, FeatureSet, Jagged, Number, Table, feed
from psfleet.optimizer import SGD, Adagrad, Adam

STEPS, SAMPLES = 4, 6
torch.set_num_threads(1)


def feature_set(name: str) -> FeatureSet:
    """All kinds of features, five of them in one table. Rows do not depend on the name of the table."""
    start = initializer.Constant(0.25)
    users = Table(f"{name}_users", 5, Adagrad(0.1), start)
    items = Table(f"{name}_items", 5, Adam(0.05), start)
    return FeatureSet(
        [
            Feature("user", users),
            Feature("friends", users, pooling="mean", weighted=True),
            Feature("follows", users, last=2),
            Feature("blocked", users, pooling="none"),
            Feature("seen", users, pooling="none", last=3),
            Number("age", 2),
            Feature("item", items, hashed=True, padding=""),
        ]
    )


def jagged(dice: np.random.Generator) -> Jagged:
    """Few ids, many repeats, some empty bags; weights and values that float32 cannot add exactly."""
    lengths = dice.integers(0, 5, SAMPLES)
    count = int(lengths.sum())
    return Jagged(dice.integers(-4, 5, count), lengths, weights=dice.uniform(0.1, 1, count))


def batches(worker: int) -> Iterator[dict[str, Any]]:
    """The steps of a worker; in some of them features are missing."""
    for step in range(STEPS):
        dice = np.random.default_rng((worker, step))
        batch = {
            "user": dice.integers(-4, 5, SAMPLES),
            **{name: jagged(dice) for name in ("friends", "follows", "blocked", "seen")},
            "age": dice.uniform(0, 90, (SAMPLES, 2)),
            "item": dice.choice(["red", "green", ""], SAMPLES),
        }
        if step % 2:
            del batch["friends"], batch["item"]
        yield batch


def by_program() -> None:
    """The loss is the sum of k * value**2, where k counts the features."""
    features = feature_set("program")
    with program_guard(Program(), Program()):
        values = layers.features(features)
        parts = [
            layers.scale(layers.reduce_sum(layers.square(value)), k + 1.0)
            for k, (name, value) in enumerate(values.items())
            if name != "age"
        ]
        loss = layers.sums(parts)
        fleet.distributed_optimizer(SGD(0.1)).minimize(loss)
        executor = Executor()
        for batch in batches(fleet.worker_index()):
            executor.run(feed=feed(features, batch), fetch_list=[loss])


def by_torch() -> None:
    """The same loss, of tensors."""
    embed = pst.FeatureEmbedding(feature_set("torch"))
    opt = pst.DistributedOptimizer(embed)
    for batch in batches(fleet.worker_index()):
        values = embed(batch)
        parts = [
            (k + 1.0) * value.square().sum()
            for k, (name, value) in enumerate(values.items())
            if name != "age"
        ]
        loss: Any = torch.stack(parts).sum()
        loss.backward()
        opt.step()
        opt.clear_grad()


def by_client() -> None:
    """The gradient of that loss, computed by hand."""
    with psfleet.connect() as ps:
        features = ps.features(feature_set("client"))
        for given in batches(ps.worker_index):
            batch = features.batch(given)
            values = batch.pool(ps.pull(batch.ids))
            gradients = {name: (k + 1.0) * 2 * v for k, (name, v) in enumerate(values.items())}
            del gradients["age"]
            ps.push(batch.gradients(gradients))


def main(out: str) -> None:
    """Save by table its step, ids, values and state."""
    fleet.init()
    results: dict[str, Any] = {}
    for train in (by_program, by_torch, by_client):
        train()
    runtime = active()
    runtime.flush()
    runtime.barrier()
    if runtime.worker_index == 0:
        for way in ("program", "torch", "client"):
            for table in ("users", "items"):
                state = runtime.read_table(key_of(f"{way}_{table}"))
                assert state.ids is not None
                results[f"{way} {table}"] = np.array([state.step])
                results[f"{way} {table} ids"] = state.ids
                results[f"{way} {table} values"] = np.concatenate(state.values, axis=1)
        np.savez(out, **results)
    runtime.barrier()
    fleet.stop_worker()


if __name__ == "__main__":
    main(sys.argv[1])
