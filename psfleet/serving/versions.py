"""Versions of a model: which are loaded, and which part of the requests each gets."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.errors import PsfleetError, UsageError
from psfleet.feature_sets.feature_set import FeatureSet
from psfleet.platform.logs import log_of
from psfleet.platform.object_store import folders_in, is_whole
from psfleet.serving.batcher import Batcher
from psfleet.serving.model import Model, load
from psfleet.settings.kinds import RowForm

_log = log_of(__name__)


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
        places = {int(n): f"{root.rstrip('/')}/{n}" for n in folders_in(root) if n.isdecimal()}
        return {number: place for number, place in places.items() if self._is_whole(place)}

    def _is_whole(self, place: str) -> bool:
        if place not in self._whole and is_whole(place):
            self._whole.add(place)
        return place in self._whole

    def numbers(self) -> list[int]:
        """The versions that are there, ascending; [1]: the folder is one itself."""
        return sorted(self._places()) or [1]

    def load(self, number: int) -> Model:
        """Make a version.

        Raises:
            PsfleetError: It cannot be loaded.
        """
        place = self._places().get(number, self.checkpoint or self.model)
        if self.checkpoint:
            return load(self.model, self.features, place, self.rows)
        return load(place, self.features, rows=self.rows)


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
            other, percentage = self._split
            self._turn += percentage
            if self._turn < 100:
                return self._loaded[self._active]
            self._turn -= 100
            return self._loaded[other]

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
        self._loaded = {each: versions[each] for each in versions if each in numbers}

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
            versions, active, (other, percentage) = dict(self._loaded), self._active, self._split
        parts = {active: 100.0 - percentage}
        parts[other] = parts.get(other, 0.0) + percentage
        every = sorted({*versions, *self.numbers()})
        return [(number, versions.get(number), parts.get(number, 0.0)) for number in every]
