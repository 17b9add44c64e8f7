"""Trains a deep network in a pipeline of stages. The script is the same with and without the pipeline.

    python examples/pipeline_mlp.py
    psfleet-launch --pipeline 1f1b --stages 2 --micro-batches 8 examples/pipeline_mlp.py

It learns to which of 10 classes a point belongs. The points are generated, so there is no download.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

import psfleet as ps
from psfleet import fleet, layers, optimizer

CLASSES, FEATURES = 10, 64


def batches(steps: int, samples: int) -> Iterator[dict[str, Any]]:
    """Yield points around one centre for each class, the same in every process."""
    dice = np.random.default_rng(0)
    centres = dice.standard_normal((CLASSES, FEATURES), np.float32)
    for _ in range(steps):
        labels = dice.integers(0, CLASSES, samples)
        noise = 2 * dice.standard_normal((samples, FEATURES), np.float32)
        yield {"point": centres[labels] + noise, "label": labels[:, None]}


def build(width: int, depth: int) -> Any:
    """Return the loss of a network with `depth` hidden layers."""
    hidden = point = layers.data("point", [None, FEATURES])
    label = layers.data("label", [None, 1], dtype="int64")
    for _ in range(depth):
        hidden = layers.fc(hidden, width, act="relu")
    scores = layers.fc(layers.concat([hidden, point], axis=1), CLASSES)
    return layers.mean(layers.softmax_with_cross_entropy(scores, label))


def main() -> None:
    """Train. The first worker's first stage prints the loss."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--samples", type=int, default=256)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--depth", type=int, default=8)
    arguments = options.parse_args()

    fleet.init()
    loss = build(arguments.width, arguments.depth)
    fleet.distributed_optimizer(optimizer.Adam(1e-3)).minimize(loss)
    executor = ps.Executor()
    for step, feed in enumerate(fleet.shard(batches(arguments.steps, arguments.samples)), 1):
        (value,) = executor.run(feed=feed, fetch_list=[loss])
        if fleet.is_first_worker() and step % 50 == 0:
            print(f"step {step}: loss {float(value.item()):.6f}", flush=True)


if __name__ == "__main__":
    main()
