"""Models for prediction: load a model, follow a running job, and serve several versions side by side.

`load` and `follow` make a Model, a function from a batch of features to predictions. A VersionedModel finds
the versions of a model in numbered folders, such as `ctr/1` and `ctr/2`. A ServedModel has the loaded
versions of one model and chooses a version for each request. While a new version is loaded, the active
version goes on predicting. A version that cannot be loaded is logged and skipped.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import ConfigError, PsfleetError, ShapeError, UsageError
from psfleet.core.base.logs import log_of
from psfleet.core.base.object_store import folders_in, is_whole, readable
from psfleet.core.base.settings.kinds import RowForm, url_of
from psfleet.core.base.validation.annotations import FilePath, checked
from psfleet.data.feature_sets.feature_set import FeatureSet
from psfleet.features import find_features
from psfleet.serving.batcher import Batcher
from psfleet.serving.follower import Follower
from psfleet.serving.prediction import check_model, find_predictor, is_folder
from psfleet.serving.row_source import (
    EXPORT,
    RowSource,
    ServedRows,
    SourceRuntime,
    rows_of_export,
    rows_of_program,
    rows_of_snapshot,
)

FEATURES = ("features.toml", "features.json")
"""Names of the file in a model's folder that describes the model's inputs. The first that exists is used."""


_log = log_of(__name__)


class Model:
    """Model for prediction, with its features and weights. Any thread may call it.

        model = psfleet.serving.load("model", "features.toml")
        chances = model({"user": [17, 42], "item": [[3, 5], [8]]})

    Args:
        name: Folder of an inference model, or MODULE:NAME of a function.
        features: Inputs of the model. None means that the model takes the feeds of a program or the
            arguments of a module.
        rows: Source of the weights: rows of sparse tables, and dense values.

    Attributes:
        name, features, rows: As passed.

    Raises:
        ConfigError, CheckpointError: There is no such model, or the weights do not fit it.
    """

    def __init__(self, name: str, features: FeatureSet | None, rows: RowSource) -> None:
        self.name = name
        self.features = features
        self.rows = rows
        self._cut = rows.cut
        self._predict = find_predictor(name, features, SourceRuntime(rows, name))

    def __call__(self, features: Any) -> Any:
        """Predict a batch.

        Args:
            features: Values by name, in any form that `psfleet.features.FeatureLookup` takes.

        Returns:
            An array [n], [n, 1] or [n, k] for n samples, or a dict of such arrays if the model has several
            outputs.

        Raises:
            UsageError: The batch does not fit the model.
        """
        # `held` makes all lookups of a prediction see the same state of the weights: a follower applies
        # changes under this lock.
        with self.rows.held():
            if self._cut != self.rows.cut:
                self._cut = self.rows.cut
                if hasattr(self._predict, "refresh"):  # a torch module has copies of dense values
                    self._predict.refresh()
            predictions = self._predict(features)
        if isinstance(predictions, Mapping):
            return {name: _array(value) for name, value in predictions.items()}
        return _array(predictions)

    def look_up(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the rows of ids, int64 [n], of a sparse table, as float32 [n, dim].

        Raises:
            UnknownTable: There is no sparse table of this name.
        """
        return self.rows.look_up(table, ids)


def _array(values: Any) -> NDArray[Any]:
    # np.asarray takes ten times as long for a tensor.
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
    """Load a model for prediction in this process. It needs no fleet and no optimizer state.

        model = psfleet.serving.load("model", "features.toml")
        chances = model({"user": [17, 42], "item": [[3, 5], [8]]})

    Args:
        model: Folder of an inference model, or MODULE:NAME of a function that returns a torch module or the
            variables of a program.
        features: Inputs of the model: a FeatureSet, a TOML or JSON file, or MODULE:NAME of a FeatureSet.
            None means the folder's features.toml or features.json or, if there is none, the feeds of the
            program.
        checkpoint: Snapshot or export with the weights. None means the weights in the model's folder.
        rows: Number format of the rows in memory. None means the format of an export, and float32 for all
            other weights.

    Raises:
        CheckpointError: The folder or the snapshot is missing or damaged.
        ConfigError: There is no such model.
    """
    name = str(model if url_of(model) is None else readable(model))
    return Model(name, features_of(name, features), rows_for(name, str(checkpoint or ""), rows))


def features_of(model: str, features: FeatureSet | FilePath | None) -> FeatureSet | None:
    """Return the feature set of a model, or None if the model has none.

    Statistics of transforms that are not fitted are read from features.json in the model's folder.

    Raises:
        ConfigError: The feature set cannot be read.
    """
    features = features_file(model) if features is None else features
    if features is None:
        return None
    feature_set = features if isinstance(features, FeatureSet) else find_features(str(features))
    if not feature_set.fitted and (statistics := Path(model, FEATURES[1])).exists():
        feature_set.load_statistics(statistics)
    return feature_set


def features_file(model: str) -> Path | None:
    """Return the file in an inference model's folder that describes the inputs, or None if there is none."""
    files = [Path(model, name) for name in FEATURES] if is_folder(model) else []
    return next((file for file in files if file.exists()), None)


def rows_for(model: str, checkpoint: str, form: RowForm | None, min_count: float = 0) -> ServedRows:
    """Read the weights of a model from a checkpoint or, if `checkpoint` is "", from the model's folder.

    Args:
        model: As in `load`.
        checkpoint: As in `load`. "" means the model's folder.
        form: Number format of the rows in memory. None means the format of an export, and float32 for all
            other weights.
        min_count: Minimum number of shows, or minimum frequency, of a row. Rows below it are left out.

    Raises:
        CheckpointError: The weights cannot be read.
        ConfigError: There are no weights, or `min_count` is set and a table counts neither shows nor
            frequency.
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
    check_model(model, has_weights=False)
    return rows_of_program(model, form or "float32")


class RowsModel(Model):
    """Model without computation, which only looks up the rows of a job. A call raises an error."""

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
    """Return a model whose weights follow a running job. Close the model's `rows` at the end.

        model = psfleet.serving.follow("logs/my-job", "app:model", "features.toml")
        chances = model({"user": [17, 42]})
        model.rows.close()

    Args:
        job: The job, as in Follower.
        model: Folder of an inference model, or MODULE:NAME of a function, as in `psfleet.serving.load`.
            With "" the model can only look rows up.
        features: Inputs of the model, as in `psfleet.serving.load`.
        settings: Further arguments of Follower.

    Raises:
        PsfleetError: The job does not reply, or there is no such model.
    """
    rows = Follower(job, **settings)
    try:
        if not model:
            return RowsModel(rows)
        return Model(model, features_of(model, features), rows)
    except BaseException:
        rows.close()
        raise


@dataclass(frozen=True)
class ModelVersion:
    """Version of a model that is loaded.

    Attributes:
        batcher: Queue of the version's requests, which makes batches of them.
    """

    number: int
    model: Model
    batcher: Batcher


class VersionedModel:
    """Finder and loader of a model's versions, which are folders with numbers as names, such as `ctr/1` and
    `ctr/2`.

        ctr = VersionedModel("ctr")
        model = ctr.load(max(ctr.numbers()))

    Args:
        model: Folder or URL of an inference model or an export, or a folder of such folders with numbers as
            names. May also be MODULE:NAME of a function that returns a torch module or the variables of a
            program.
        features, rows: As in `psfleet.serving.load`.
        checkpoint: Snapshot or export with the weights, or a folder of such folders with numbers as names.

    Attributes:
        model, features, rows, checkpoint: As given.
    """

    def __init__(
        self,
        model: str,
        features: FeatureSet | str | None = None,
        checkpoint: str = "",
        rows: RowForm | None = None,
    ) -> None:
        self.model = model
        self.features = features
        self.rows: RowForm | None = rows
        self.checkpoint = checkpoint
        self._whole: set[str] = set()  # folders known to be complete, which are not checked again

    def _places(self) -> dict[int, str]:
        """Return the folder or URL of each complete version. Returns {} if `model` is a single model."""
        root = self.checkpoint or self.model
        if self._is_whole(root):
            return {}
        locations = {int(n): f"{root.rstrip('/')}/{n}" for n in folders_in(root) if n.isdecimal()}
        return {
            number: location for number, location in locations.items() if self._is_whole(location)
        }

    def _is_whole(self, location: str) -> bool:
        if location not in self._whole and is_whole(location):
            self._whole.add(location)
        return location in self._whole

    def numbers(self) -> list[int]:
        """Return the numbers of the complete versions in ascending order, or [1] for a single model."""
        return sorted(self._places()) or [1]

    def load(self, number: int) -> Model:
        """Load the version with this number.

        Raises:
            PsfleetError: The version cannot be loaded.
        """
        location = self._places().get(number, self.checkpoint or self.model)
        if self.checkpoint:
            return load(self.model, self.features, location, self.rows)
        return load(location, self.features, rows=self.rows)


class ServedModel:
    """Loaded versions of one model, and their shares of the requests. Any thread may call it.

        served.route(3, 10)  # version 3 gets every tenth request
        served.route(3)      # version 3 becomes the active one

    At most three versions stay loaded: the active version, the previously active one for an immediate
    return, and one that gets a share of the requests. All requests without a share go to the active
    version.

    Args:
        name: Name of the model, as clients give it.
        numbers: Function that returns the numbers of all versions in ascending order.

    Attributes:
        pinned: True after `route` was called. Newer versions then do not become active by themselves.

    Raises:
        PsfleetError: The newest version cannot be loaded.
    """

    def __init__(
        self, name: str, numbers: Callable[[], list[int]], load: Callable[[int], ModelVersion]
    ) -> None:
        self.name = name
        self.numbers = numbers
        self.pinned = False
        self._load = load
        # `_loading` is locked while a version loads, which may take minutes; `_lock` only while routing is
        # read or changed. Always lock `_loading` first. With a single lock, requests would wait until a
        # load ends.
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._refused: set[int] = set()
        self._is_unlisted = False
        newest = numbers()[-1]
        self._loaded = {newest: load(newest)}
        self._active = newest
        self._before = newest
        self._split: tuple[int, float] = (newest, 0.0)
        self._turn = 0.0

    @property
    def active(self) -> ModelVersion:
        """Version that gets all requests except those that another version gets as its share."""
        return self._loaded[self._active]

    def choose(self, number: int = 0) -> ModelVersion:
        """Choose the version that predicts a request.

        Args:
            number: Version that the client requests, or 0 to choose by the versions' shares of the requests.

        Raises:
            UsageError: The version is not loaded.
        """
        with self._lock:
            if number:
                version = self._loaded.get(number)
                if version is None:
                    raise UsageError(
                        f"version {number} of the model {self.name!r} is not loaded; loaded are "
                        f"{', '.join(map(str, sorted(self._loaded)))}"
                    )
                return version
            split_number, percentage = self._split
            # Adds up percentages like a carry: at 25 percent, each fourth request reaches 100. This is
            # exact, and avoids the clusters that random numbers would give.
            self._turn += percentage
            if self._turn < 100:
                return self._loaded[self._active]
            self._turn -= 100
            return self._loaded[split_number]

    def route(self, number: int, percentage: float = 100.0) -> None:
        """Send a share of the requests to a version, beginning with the next request.

            served.route(3, 10)  # version 3 gets every tenth request

        Args:
            number: Number of the version. It is loaded first if necessary.
            percentage: Share of the requests, 0 to 100. With 100 the version becomes the active one.

        Raises:
            UsageError: There is no such version, or the percentage is out of range.
            PsfleetError: The version cannot be loaded. The shares are then unchanged.
        """
        if not 0 <= percentage <= 100:
            raise UsageError(f"the percentage is {percentage:g}; it must be 0 to 100")
        with self._loading:
            if number not in self._loaded and number not in self.numbers():
                raise UsageError(
                    f"the model {self.name!r} has no version {number}; it has "
                    f"{', '.join(map(str, self.numbers()))}"
                )
            version = self._loaded.get(number) or self._load(number)
            with self._lock:
                self._set(version, percentage)
                self.pinned = True

    def _set(self, version: ModelVersion, percentage: float) -> None:
        number, self._turn = version.number, 0.0
        versions = {**self._loaded, number: version}
        if percentage < 100:
            self._split = number, percentage
        else:
            self._before = self._active if number != self._active else self._before
            self._active, self._split = number, (number, 0.0)
        numbers = {
            self._active,
            self._before,
            self._split[0],
        }  # keeps _before, so that `route` can return to it at once
        self._loaded = {
            loaded_number: versions[loaded_number]
            for loaded_number in versions
            if loaded_number in numbers
        }

    def refresh(self) -> None:
        """Load the newest version and make it active. Does nothing after `route` was called.

        A version that cannot be loaded is logged once and not tried again.
        """
        if self.pinned:
            return
        try:
            newest = self.numbers()[-1]
        except PsfleetError as error:  # an object store may be reachable again later
            if not self._is_unlisted:
                _log.warning(f"psfleet: the versions of {self.name!r} cannot be listed: {error}")
            self._is_unlisted = True
            return
        self._is_unlisted = False
        if newest <= self._active or newest in self._refused:
            return
        with self._loading:
            if self.pinned:  # `route` may have run while this waited for the lock
                return
            try:
                version = self._load(newest)
            except Exception as error:  # a user's module may raise any error
                self._refused.add(newest)
                _log.warning(
                    f"psfleet: version {newest} of the model {self.name!r} cannot be loaded: {error}"
                )
                return
            with self._lock:
                self._set(version, 100.0)
        _log.info(f"psfleet: version {newest} of the model {self.name!r} is active")

    def versions(self) -> list[tuple[int, ModelVersion | None, float]]:
        """Return all versions: for each its number, the loaded version or None, and its percentage of the
        requests.
        """
        with self._lock:
            versions, active, (split_number, percentage) = (
                dict(self._loaded),
                self._active,
                self._split,
            )
        parts = {active: 100.0 - percentage}
        parts[split_number] = parts.get(split_number, 0.0) + percentage
        every = sorted({*versions, *self.numbers()})
        return [(number, versions.get(number), parts.get(number, 0.0)) for number in every]
