"""A small click model, trained in this process and saved in both ways."""

from pathlib import Path
from typing import Any

import numpy as np

import psfleet as ps
from psfleet import fleet, layers, optimizer
from psfleet.features import Feature, FeatureSet, Number, Table, feed

USERS, ITEMS = Table("users", 4), Table("items", 4)
FEATURES = FeatureSet(
    [
        Feature("user", USERS, hashed=True),
        Feature("items", ITEMS, pooling="mean"),
        Number("age", default=-1.0),
    ]
)
BATCH: dict[str, Any] = {
    "user": ["anna", "7", "bert", 7],
    "items": [[1, 2], [], [3], [2, 2, 9]],
    "age": [0.5, 0.25, 1.0, 0.0],
}


def chance(features: FeatureSet = FEATURES) -> Any:
    """The variable of the model's prediction."""
    values = layers.features(features)
    hidden = layers.fc(layers.concat(list(values.values()), axis=1), 8, act="relu")
    return layers.sigmoid(layers.fc(hidden, 1))


def train(folder: Path, steps: int = 5) -> Any:
    """Train the model and save it as `model`, and a snapshot as `snapshot`; the predictions of BATCH."""
    ps.reset()
    fleet.init()
    model = chance()
    label = layers.data("label", [None, 1])
    loss = layers.mean(layers.log_loss(model, label))
    fleet.distributed_optimizer(optimizer.Adam(0.05)).minimize(loss)
    exe = ps.Executor()
    labels = np.array([[1.0], [0.0], [1.0], [0.0]], np.float32)
    for _ in range(steps):
        exe.run(feed={**feed(FEATURES, BATCH), "label": labels}, fetch_list=[loss])
    fleet.save_inference_model(str(folder / "model"), list(feed(FEATURES, BATCH)), [model])
    fleet.save_persistables(str(folder / "snapshot"))
    fed = {**feed(FEATURES, BATCH), "label": labels}
    program, names, targets = ps.fluid.io.load_inference_model(str(folder / "model"))
    (outputs,) = exe.run(program, feed={n: fed[n] for n in names}, fetch_list=targets)
    ps.reset()
    return outputs
