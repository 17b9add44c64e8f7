"""What `psfleet predict` was asked for, and one process's part of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint import MANIFEST
from psfleet.checkpoint.tensors import digest
from psfleet.datasets.parquet import ParquetFiles
from psfleet.datasets.parquet_predictions import ParquetPredictions, Predict
from psfleet.datasets.text_files import TextFiles
from psfleet.embedded.frozen_runtime import FrozenRuntime
from psfleet.errors import ConfigError, ShapeError
from psfleet.execution.inference import Loaded, frozen_program, load_inference
from psfleet.feature_sets.feature_set import FeatureSet
from psfleet.features import feed, find_features
from psfleet.platform.named_object import find_object
from psfleet.prediction.predictors import predictor_of, program_predictor
from psfleet.program.variable import Variable
from psfleet.runtime import interface as runtimes

__all__ = ["PredictionJob"]

_PROGRAM = "program.json"


@dataclass(frozen=True)
class PredictionJob:
    """What predicts what.

    Attributes:
        model: The folder of an inference model, or MODULE:NAME of a function that makes the model.
        data: Files and folders of Parquet files, or files that `TextFiles` reads.
        target: The folder of the predictions.
        features: A TOML file, or MODULE:NAME of a FeatureSet.
        checkpoint: The snapshot that has the weights; "": the inference model has them.
        columns: Columns of the files that come with the predictions.
        bad_rows, batch_size, part_rows: See `ParquetFiles` and `ParquetPredictions`.
    """

    model: str
    data: list[str]
    target: str
    features: str
    checkpoint: str
    columns: list[str]
    bad_rows: Literal["fail", "skip"]
    batch_size: int
    part_rows: int

    def predictions(self) -> ParquetPredictions:
        """The predictions, as far as they are written."""
        if not (self.checkpoint or self._is_folder):
            raise ConfigError(
                f"the model {self.model!r} is no folder of an inference model, so it needs --checkpoint for "
                "its weights"
            )
        kind = TextFiles if self.data[0].endswith(TextFiles.endings) else ParquetFiles
        files = kind(self.data, find_features(self.features), bad_rows=self.bad_rows)
        weights = Path(self.checkpoint, MANIFEST) if self.checkpoint else Path(self.model, _PROGRAM)
        if not weights.exists():
            raise ConfigError(
                f"{str(weights.parent)!r} has no {weights.name}; name a folder with weights"
            )
        model = f"{self.model} {digest(weights)}"
        return ParquetPredictions(
            files, self.target, self.columns, self.batch_size, self.part_rows, model
        )

    @property
    def _is_folder(self) -> bool:
        return Path(self.model, _PROGRAM).exists()

    def run(self) -> None:
        """Write what no other process has written."""
        predictions = self.predictions()
        predictions.write(self._predictor(find_features(self.features)))

    def _predictor(self, features: FeatureSet) -> Predict:
        tables = FrozenRuntime(self.checkpoint) if self.checkpoint else None
        if self._is_folder:
            return _of_program(load_inference(self.model, tables), features)
        assert tables is not None
        runtimes.use(tables)  # a model that makes tables finds them there
        made = find_object(self.model, "model", "name a folder, or MODULE:NAME of a function")()
        if isinstance(made, Variable):
            return _of_program(frozen_program([made])(tables), features)
        if isinstance(made, Mapping):
            loaded = frozen_program(list(made.values()))(tables)
            return _of_program(loaded, features, list(made))
        return predictor_of(made)(tables)


def _of_program(loaded: Loaded, features: FeatureSet, names: list[str] | None = None) -> Predict:
    """What runs a program on the features of a batch."""
    program, feeds, targets = loaded
    several = [target.name for target in targets] if len(targets) > 1 else [""]
    predict = program_predictor(loaded, names or several)

    def on_features(given: dict[str, Any]) -> Any:
        fed = feed(features, given)
        plain = {name: _plain(fed, program.variable(name)) for name in feeds if name not in fed}
        return predict({**fed, **plain})

    return on_features


def _plain(fed: Mapping[str, NDArray[Any]], variable: Variable) -> NDArray[Any]:
    """The ids of a feature as an input of a program that has a number of ids for each sample."""
    ids, lengths = fed.get(f"{variable.name}.ids"), fed.get(f"{variable.name}.lengths")
    if ids is None or lengths is None:
        raise ConfigError(
            f"the model needs the input {variable.name!r}, and no feature has that name; add it to --features"
        )
    width = int(np.prod([extent for extent in variable.shape[1:] if extent is not None]))
    if (lengths != width).any():
        raise ShapeError(
            f"the input {variable.name!r} takes {width} ids a row, and a row has "
            f"{lengths[lengths != width][0]}; correct the column"
        )
    return ids.reshape(len(lengths), *variable.shape[1:])
