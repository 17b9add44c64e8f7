"""A model that predicts: its inputs, its rows, of a file or of a running job, and what it computes."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.errors import ConfigError, ShapeError, UsageError
from psfleet.feature_sets.feature_set import FeatureSet
from psfleet.features import find_features
from psfleet.platform.object_store import readable
from psfleet.prediction import find_predictor, is_folder
from psfleet.serving.exported_rows import EXPORT, rows_of_export
from psfleet.serving.follower import Follower
from psfleet.serving.row_source import (
    RowSource,
    ServedRows,
    SourceRuntime,
    rows_of_program,
    rows_of_snapshot,
)
from psfleet.settings.kinds import RowForm, url_of
from psfleet.validation.annotations import FilePath, checked

FEATURES = ("features.toml", "features.json")
"""Files of a model's folder that describe its inputs; the first one that is there counts."""


class Model:
    """A model with all that it needs to predict. Any thread may call it.

    Args:
        name: Name of the model, as it was loaded.
        features: Its inputs; None: the feeds of a program, or what a module is called with.
        rows: Source of its rows and dense values.

    Attributes:
        name, features, rows: As given.

    Raises:
        ConfigError, CheckpointError: The model cannot be made with these rows.
    """

    def __init__(self, name: str, features: FeatureSet | None, rows: RowSource) -> None:
        self.name = name
        self.features = features
        self.rows = rows
        self._cut = rows.cut
        self._predict = find_predictor(name, features, SourceRuntime(rows, name))

    def __call__(self, features: Any) -> Any:
        """The predictions of a batch.

        Args:
            features: A mapping from names to values, as `psfleet.features.FeatureLookup` takes it.

        Returns:
            An array [n], [n, 1] or [n, k]; of a model with several outputs a dict of them.

        Raises:
            UsageError: The batch does not fit the model.
        """
        with self.rows.held():
            if self._cut != self.rows.cut:
                self._cut = self.rows.cut
                if hasattr(self._predict, "refresh"):  # a module's copies of dense values
                    self._predict.refresh()
            predictions = self._predict(features)
        if isinstance(predictions, Mapping):
            return {name: _array(value) for name, value in predictions.items()}
        return _array(predictions)

    def look_up(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """The rows of ids, int64 [n], of a table: float32 [n, dim].

        Raises:
            UnknownTable: There is no such sparse table.
        """
        return self.rows.look_up(table, ids)


def _array(values: Any) -> NDArray[Any]:
    # np.asarray of a tensor takes ten times as long
    array: NDArray[Any] = values.numpy() if hasattr(values, "numpy") else np.asarray(values)
    if array.ndim not in (1, 2):
        raise ShapeError(
            f"a prediction is of shape {array.shape}; it must be [n], [n, 1] or [n, k]"
        )
    return array


@checked
def load(
    model: FilePath,
    features: FeatureSet | FilePath | None = None,
    checkpoint: FilePath | None = None,
    rows: RowForm | None = None,
) -> Model:
    """A model for prediction in this process: no fleet, no optimizer.

        model = psfleet.serving.load("model", "features.toml")
        chances = model({"user": [17, 42], "item": [[3, 5], [8]]})

    Args:
        model: The folder of an inference model, or MODULE:NAME of a function that makes a torch module or the
            variables of a program.
        features: Its inputs: a FeatureSet, a TOML or JSON file, or MODULE:NAME of a FeatureSet. None: the
            folder's features.toml or features.json, or else the feeds of the program.
        checkpoint: The snapshot or export with the weights; None: those of the folder.
        rows: Form of the rows in memory; None: float32, or that of an export.

    Raises:
        CheckpointError: The folder or the snapshot is missing or damaged.
        ConfigError: There is no such model.
    """
    name = str(model if url_of(model) is None else readable(model))
    return Model(name, features_of(name, features), rows_for(name, str(checkpoint or ""), rows))


def features_of(model: str, features: FeatureSet | FilePath | None) -> FeatureSet | None:
    """The feature set of a model; None: it has none.

    A set whose transforms are not fitted takes what they lack from the features.json of the model's folder.

    Raises:
        ConfigError: It cannot be read.
    """
    features = features_file(model) if features is None else features
    if features is None:
        return None
    feature_set = features if isinstance(features, FeatureSet) else find_features(str(features))
    if not feature_set.fitted and (statistics := Path(model, FEATURES[1])).exists():
        feature_set.load_statistics(statistics)
    return feature_set


def features_file(model: str) -> Path | None:
    """The file of the folder of an inference model that describes its inputs; None: there is none."""
    files = [Path(model, name) for name in FEATURES] if is_folder(model) else []
    return next((file for file in files if file.exists()), None)


def rows_for(model: str, checkpoint: str, form: RowForm | None, min_count: float = 0) -> ServedRows:
    """The rows of a model: those of its checkpoint, else of its folder.

    Args:
        model, checkpoint: As for `load`.
        form: Form of the rows; None: float32, or that of an export.
        min_count: Rows with smaller counts are left out.

    Raises:
        CheckpointError: They cannot be read.
        ConfigError: There are none.
    """
    path = str(readable(checkpoint or model))
    if min_count and (not checkpoint or Path(path, EXPORT).exists()):
        raise ConfigError(
            f"{path!r} has no counts of its rows; name the snapshot that has them as the checkpoint"
        )
    if Path(path, EXPORT).exists():
        return rows_of_export(path, form)
    if checkpoint:
        return rows_of_snapshot(path, form or "float32", min_count)
    if not is_folder(model):
        raise ConfigError(
            f"the model {model!r} is no folder of an inference model, so it needs a checkpoint for its "
            "weights"
        )
    return rows_of_program(model, form or "float32")


class RowsModel(Model):
    """The rows of a job without a model: they can be looked up.

    Args:
        rows: Source of the rows.
    """

    def __init__(self, rows: Follower) -> None:
        self.name = "rows"
        self.features = None
        self.rows = rows

    @override
    def __call__(self, features: Any) -> NoReturn:
        raise UsageError("this service follows a job without a model, so it gives rows only")


def follow(
    job: str | os.PathLike[str] | Sequence[str],
    model: str = "",
    features: FeatureSet | str | None = None,
    **settings: Any,
) -> Model:
    """A model with the weights of a running job, which stay up to date; close its `rows` in the end.

    Args:
        job: The job, as for Follower.
        model: The folder of an inference model, or MODULE:NAME, as for `psfleet.serving.load`; "": none.
        features: Its inputs, likewise.
        settings: Further arguments of Follower.

    Raises:
        PsfleetError: The job does not answer, or there is no such model.
    """
    rows = Follower(job, **settings)
    try:
        if not model:
            return RowsModel(rows)
        return Model(model, features_of(model, features), rows)
    except BaseException:
        rows.close()
        raise
