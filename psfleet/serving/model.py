"""A model that predicts: its inputs, rows and computation; and its versions, which share the requests."""

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
"""Files of a model's folder that describe its inputs; the first one that is there counts."""


_log = log_of(__name__)


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
    check_model(model, has_weights=False)
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


@dataclass(frozen=True)
class ModelVersion:
    """A loaded version.

    Attributes:
        number: Number of the version.
        model: The model itself.
        batcher: Batches of its requests.
    """

    number: int
    model: Model
    batcher: Batcher


class VersionedModel:
    """A model whose versions are folders with numbers as names, such as `ctr/1` and `ctr/2`.

    Args:
        model: The folder or URL of an inference model or an export, a folder that holds such folders by
            number, or MODULE:NAME of a function that makes a torch module or the variables of a program.
        features, rows: As for `psfleet.serving.load`.
        checkpoint: The snapshot or export with the weights, or a folder that holds such folders by number.

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
        self._whole: set[str] = set()  # places that were whole, which they stay

    def _places(self) -> dict[int, str]:
        """The folder or URL of each version; {}: the model has none by number."""
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
        """The versions that are there, ascending; [1]: the folder is one itself."""
        return sorted(self._places()) or [1]

    def load(self, number: int) -> Model:
        """Make a version.

        Raises:
            PsfleetError: It cannot be loaded.
        """
        location = self._places().get(number, self.checkpoint or self.model)
        if self.checkpoint:
            return load(self.model, self.features, location, self.rows)
        return load(location, self.features, rows=self.rows)


class ServedModel:
    """The versions of a model. Requests go to the active one, a part of them perhaps to another.

    Args:
        name: Name of the model, for clients.
        numbers: Gives the versions that there are, ascending.
        load: Makes a version.

    Attributes:
        pinned: True after `route`: newer versions do not become active by themselves.

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
        self._lock = threading.Lock()  # of routing
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
        """The version that gets all requests that no split takes."""
        return self._loaded[self._active]

    def choose(self, number: int = 0) -> ModelVersion:
        """The version for a request.

        Args:
            number: The one that the client asks for; 0: as traffic goes.

        Raises:
            UsageError: It is not loaded.
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
            self._turn += percentage
            if self._turn < 100:
                return self._loaded[self._active]
            self._turn -= 100
            return self._loaded[split_number]

    def route(self, number: int, percentage: float = 100.0) -> None:
        """Give a version this part of the requests, from the next one on; 100: it becomes the active one.

        Raises:
            UsageError: There is no such version, or the percentage makes no sense.
            PsfleetError: It cannot be loaded; all goes on as before.
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
        numbers = {self._active, self._before, self._split[0]}  # one command leads back
        self._loaded = {
            loaded_number: versions[loaded_number]
            for loaded_number in versions
            if loaded_number in numbers
        }

    def refresh(self) -> None:
        """Load a version that is newer than the active one, and make it active, unless one is pinned.

        One that cannot be loaded is said once and left out.
        """
        if self.pinned:
            return
        try:
            newest = self.numbers()[-1]
        except PsfleetError as error:  # of a store, which may answer again
            if not self._is_unlisted:
                _log.warning(f"psfleet: the versions of {self.name!r} cannot be listed: {error}")
            self._is_unlisted = True
            return
        self._is_unlisted = False
        if newest <= self._active or newest in self._refused:
            return
        with self._loading:
            if self.pinned:  # meanwhile
                return
            try:
                version = self._load(newest)
            except Exception as error:  # of a user's module too: the active version goes on
                self._refused.add(newest)
                _log.warning(
                    f"psfleet: version {newest} of the model {self.name!r} cannot be loaded: {error}"
                )
                return
            with self._lock:
                self._set(version, 100.0)
        _log.info(f"psfleet: version {newest} of the model {self.name!r} is active")

    def versions(self) -> list[tuple[int, ModelVersion | None, float]]:
        """Each version by its number: what is loaded, and the percentage of requests that it gets."""
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
