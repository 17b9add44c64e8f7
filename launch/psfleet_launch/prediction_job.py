"""Offline prediction of `psfleet predict`: the request (PredictionJob), and the program of its processes.

`psfleet predict` starts processes with `python -m psfleet_launch.prediction_job JOB`, where JOB is a
PredictionJob in JSON. The processes share the work: each writes parts of the predictions that no other
process has begun.
"""

import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from psfleet.checkpoint import MANIFEST
from psfleet.checkpoint.safetensors_files import digest
from psfleet.core.base.errors import ConfigError, PsfleetError
from psfleet.core.base.settings.environment import read_environment
from psfleet.core.base.settings.kinds import local_path
from psfleet.core.engine.rules import import_rules
from psfleet.core.runtime.embedded_runtime import FrozenRuntime
from psfleet.data.feature_sets.feature_set import FeatureSet
from psfleet.data.parquet import ParquetFiles
from psfleet.data.parquet_predictions import ParquetPredictions
from psfleet.data.text_files import TextFiles
from psfleet.serving.model import features_of
from psfleet.serving.prediction import PROGRAM, check_model, find_predictor


@dataclass(frozen=True)
class PredictionJob:
    """Request for predictions of a model for all rows of some files.

    Attributes:
        model: Folder of an inference model, or MODULE:NAME of a function that makes the model.
        data: Parquet files, folders of Parquet files, or files that `TextFiles` reads.
        target: Folder for the predictions.
        features: TOML or JSON file with the features, or MODULE:NAME of a FeatureSet, or "" for the
            features in the model's folder.
        checkpoint: Snapshot with the weights, or "" if the inference model has them.
        columns: Columns of the data to copy to the predictions.
        bad_rows: "skip" to leave out rows that cannot be read, or "fail", as in `ParquetFiles`.
        batch_size: Number of rows that the model gets at a time, as in `ParquetPredictions`.
        part_rows: Number of rows after which a new file of predictions begins. A file always has complete
            row groups of the data.
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

    @functools.cached_property
    def feature_set(self) -> FeatureSet:
        """Features of the model, which describe its inputs.

        Raises:
            ConfigError: There is no description of the features, or it cannot be read.
        """
        features = features_of(self.model, self.features or None)
        if features is None:
            raise ConfigError(
                f"the model {self.model!r} has no features.toml or features.json; say with --features what "
                "its inputs are"
            )
        return features

    def predictions(self) -> ParquetPredictions:
        """Return the predictions in the target folder. Some or all parts may be written already."""
        for path in (self.model, self.target, self.checkpoint):
            local_path(path)  # no URL
        check_model(self.model, has_weights=bool(self.checkpoint))
        is_text = self.data[0].lower().endswith(tuple(TextFiles.endings))
        kind = TextFiles if is_text else ParquetFiles
        files = kind(self.data, self.feature_set, bad_rows=self.bad_rows)
        weights = Path(self.checkpoint, MANIFEST) if self.checkpoint else Path(self.model, PROGRAM)
        if not weights.exists():
            raise ConfigError(
                f"{str(weights.parent)!r} has no {weights.name}; name a folder with weights"
            )
        model = f"{self.model} {digest(weights)}"
        return ParquetPredictions(
            files, self.target, self.columns, self.batch_size, self.part_rows, model
        )

    def run(self) -> None:
        """Write the parts of the predictions that no other process has written."""
        predictions = self.predictions()
        tables = FrozenRuntime(self.checkpoint) if self.checkpoint else None
        predictions.write(find_predictor(self.model, self.feature_set, tables))


def main(text: str) -> int:
    """Run a PredictionJob given as JSON, and return the exit code of this process."""
    try:
        import_rules(read_environment().rules)  # snapshots refer to them
        PredictionJob(**json.loads(text)).run()
    except (PsfleetError, OSError) as error:
        print(f"psfleet: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
