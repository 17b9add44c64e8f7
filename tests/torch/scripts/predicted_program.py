"""A program of a feature set, trained on Parquet files; for test_predict.py."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

import psfleet
from psfleet import fleet, layers, optimizer
from psfleet.data.arrow_conversion import Rows
from psfleet.data.parquet import ParquetFiles
from psfleet.features import Feature, FeatureSet, Number, Table, feed

BATCH = 4


def feature_set(prefix: str) -> FeatureSet:
    """Two tables, a feature with several ids, and a number."""
    users = Table(f"{prefix}_users", 5, optimizer.Adagrad(0.1))
    items = Table(f"{prefix}_items", 5, optimizer.Adam(0.05))
    return FeatureSet(
        [
            Feature("user", users),
            Feature("seen", items, pooling="mean", hashed=True),
            Number("age", default=-1.0),
        ]
    )


FEATURES = feature_set("program")


def chance() -> Any:
    """The variable of the program; dropout tells training from prediction."""
    values = layers.features(FEATURES)
    hidden = layers.fc(layers.concat(list(values.values()), axis=1), 5, act="relu", name="hidden")
    return layers.sigmoid(layers.fc(layers.dropout(hidden, 0.5), 1, name="out"))


def dying() -> Any:
    """The same, and the process is killed at its ninth batch if the file PSFLEET_TEST_DIE is there."""
    run, calls = psfleet.Executor.run, 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        mark = Path(os.environ["PSFLEET_TEST_DIE"])
        if calls == 9 and mark.exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return run(*arguments, **named)

    psfleet.Executor.run = counted  # type: ignore[method-assign]
    return chance()


def batches(files: ParquetFiles) -> list[Rows]:
    """Of each row group one after the other."""
    groups = [files.group(number) for number in range(len(files.groups))]
    return [
        rows.chosen(slice(start, start + BATCH))
        for rows in groups
        if rows is not None
        for start in range(0, len(rows.numbers), BATCH)
    ]


def train(data: str, folder: Path) -> Any:
    """Save an inference model; the forward pass for all rows."""
    files = ParquetFiles(data, FEATURES, ["click"])
    predicted = chance()
    label = layers.data("label", [None, 1])
    loss = layers.mean(layers.square_error_cost(predicted, label))
    fleet.distributed_optimizer(optimizer.Adam(0.05)).minimize(loss)
    executor = psfleet.Executor()
    for rows in batches(files):
        fed = feed(FEATURES, rows.features)
        executor.run(feed={**fed, "label": rows.labels["click"][:, None]}, fetch_list=[loss])
    fleet.save_inference_model(str(folder / "program"), list(fed), [predicted])
    test = psfleet.default_main_program().clone(for_test=True)
    outputs = []
    for rows in batches(files):
        outputs += executor.run(test, feed=feed(FEATURES, rows.features), fetch_list=[predicted])
    return np.concatenate(outputs)
