"""Which slices metrics have: some that a script numbers, or the values of features."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.errors import ConfigError, ShapeError
from psfleet.feature_sets.jagged import as_jagged

__all__ = ["MetricSlices", "Slices"]

Ids = NDArray[np.int64]
Slices = Sequence[str] | Mapping[str, Sequence[int | str]]
_OTHER = "other"


class MetricSlices:
    """The slices of all metrics of a set: a fixed number.

    Args:
        slices: Names of slices, which `update` is told by number; or by feature the values that have a
            slice each, {"device": ["phone", "desktop"]}, beside which all others share one.

    Attributes:
        count: How many there are, 1 if none are wanted.
        labels: Of each its name in readings.
        whole: Slices in which each sample is once.

    Raises:
        ConfigError: A value is listed twice, or is called "other".
    """

    def __init__(self, slices: Slices) -> None:
        self._features: dict[str, dict[Any, int]] = {}  # the slice of each value
        if not isinstance(slices, Mapping):
            self.labels = list(slices)
            self.count = max(len(slices), 1)
            self.whole = slice(self.count)
            return
        self.labels = []
        for feature, values in slices.items():
            named = {value: len(self.labels) + k for k, value in enumerate(values)}
            if len(named) < len(values) or _OTHER in named or isinstance(values, str):
                raise ConfigError(
                    f"the slices of feature {feature!r} are {values!r:.80}; give a list of values, each "
                    f"once, and none called {_OTHER!r}, where all values that are not listed are"
                )
            named[_OTHER] = len(self.labels) + len(values)
            self._features[feature] = named
            self.labels += [f"{feature}={value}" for value in named]
        self.count = max(len(self.labels), 1)
        self.whole = slice(len(next(iter(self._features.values()), [_OTHER])))

    def layout(self) -> str:
        """What two sets must have in common beside their count."""
        return "\n".join(self.labels) if self._features else ""

    def numbered(self, given: Any, labels: ArrayLike) -> list[Any]:
        """The slice of each sample, int64 [n], for each feature by whose values metrics are sliced.

        Args:
            given: What `FleetMetrics.update` is told.
            labels: As many as there are samples.

        Raises:
            ShapeError: It cannot be meant.
        """
        if not self._features:
            return [given]
        if not isinstance(given, Mapping):
            raise ShapeError(
                f"slices are {given!r:.60}; give a mapping with the values of "
                f"{', '.join(self._features)}, such as the features of the batch"
            )
        samples = np.size(labels)
        return [
            self._of_feature(feature, named, given.get(feature), samples)
            for feature, named in self._features.items()
        ]

    def _of_feature(self, feature: str, named: Mapping[Any, int], given: Any, samples: int) -> Ids:
        numbers = np.full(samples, named[_OTHER], np.int64)
        if given is None:
            return numbers
        jagged = as_jagged(feature, given)
        if len(jagged) != samples:
            raise ShapeError(
                f"feature {feature!r} has {len(jagged)} samples for {samples} scores; give one for each"
            )
        single = jagged.lengths == 1
        starts = np.cumsum(jagged.lengths) - jagged.lengths
        values = jagged.values[starts[single]].tolist()
        numbers[single] = [named.get(value, named[_OTHER]) for value in values]
        return numbers
