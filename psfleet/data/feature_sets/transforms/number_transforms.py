"""Transforms of numbers: Log1p, Clip, Normalize, MinMax, Bucketize and Quantiles.

Values of all sources are rounded to float32 first, so that they give the same bits. NumPy then computes in
float64, except that Bucketize compares float32 with float32.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.validation.annotations import PositiveInt
from psfleet.data.feature_sets.jagged import Jagged
from psfleet.data.feature_sets.transforms.transform import (
    Doubles,
    FittedTransform,
    Transform,
    numbers_of,
    plain_values,
)

_BUFFER = 1 << 15  # values of a level of the sketch


@dataclass
class Log1p(Transform):
    """The natural logarithm of 1 + x, for counts and prices.

    Number("price", transform=Log1p())  # 0 -> 0, 1.718 -> 1
    """

    takes = "float"

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        values = numbers_of(inputs[0], self)
        if len(values) and not values.min() > -1:
            raise UsageError(
                f"Log1p has the value {values.min()}, and takes values above -1; put Clip(low=0) before it"
            )
        return inputs[0].with_values(np.log1p(values))


@dataclass
class Clip(Transform):
    """Limits values to the range from `low` to `high`. A limit of None does not apply.

    Number("age", transform=Clip(0, 100))  # 150 -> 100
    """

    takes = "float"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise ConfigError("Clip has neither low nor high; give one of them")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ConfigError(f"Clip: low is {self.low} and high is {self.high}; exchange them")

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        return inputs[0].with_values(np.clip(numbers_of(inputs[0], self), self.low, self.high))


@dataclass
class Normalize(FittedTransform):
    """The number of standard deviations from the mean: (x - mean) / std.

        Number("price", transform=[Log1p(), Normalize()])

    Attributes:
        mean, std: Mean and standard deviation of the population, or None to have `fit` compute them in
            float64. If all values are equal, std is 1.
    """

    takes = "float"
    mean: float | None = None
    std: float | None = None
    _seen: Any = field(default=(0, 0.0, 0.0), init=False, repr=False, compare=False)

    @property
    @override
    def fitted(self) -> bool:
        return self.mean is not None and self.std is not None

    @override
    def observe(self, *inputs: Jagged) -> None:
        values = numbers_of(inputs[0], self)
        count, mean, squares = self._seen
        if not len(values):
            return
        total, batch_mean = count + len(values), float(values.mean())
        squares += float(np.square(values - batch_mean).sum())
        squares += (batch_mean - mean) ** 2 * count * len(values) / total
        self._seen = total, mean + (batch_mean - mean) * len(values) / total, squares

    @override
    def finish(self) -> None:
        count, mean, squares = self._seen
        if not count:
            raise UsageError("Normalize has seen no value; fit it with data that has some")
        self.mean, self.std = mean, float(np.sqrt(squares / count)) or 1.0

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        self.check_fitted()
        assert self.mean is not None
        assert self.std is not None
        return inputs[0].with_values((numbers_of(inputs[0], self) - self.mean) / self.std)


@dataclass
class MinMax(FittedTransform):
    """The place between the least and the largest value, from 0 to 1; values beyond them become 0 and 1.

        Number("age", transform=MinMax())

    Attributes:
        low, high: The smallest and the largest value, or None to have `fit` find them.
    """

    takes = "float"
    low: float | None = None
    high: float | None = None
    _seen: Any = field(default=(np.inf, -np.inf), init=False, repr=False, compare=False)

    @property
    @override
    def fitted(self) -> bool:
        return self.low is not None and self.high is not None

    @override
    def observe(self, *inputs: Jagged) -> None:
        values = numbers_of(inputs[0], self)
        if len(values):
            low, high = self._seen
            self._seen = min(low, float(values.min())), max(high, float(values.max()))

    @override
    def finish(self) -> None:
        low, high = self._seen
        if low > high:
            raise UsageError("MinMax has seen no value; fit it with data that has some")
        self.low, self.high = low, high

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        self.check_fitted()
        assert self.low is not None
        assert self.high is not None
        values = numbers_of(inputs[0], self) - self.low
        return inputs[0].with_values(np.clip(values / ((self.high - self.low) or 1.0), 0.0, 1.0))


def _check_ascending(owner: str, boundaries: Sequence[float]) -> None:
    for before, after in itertools.pairwise(boundaries):
        if not after > before:
            raise ConfigError(
                f"{owner}: the boundary {after} comes after {before}; sort them, each once"
            )


@dataclass
class Bucketize(Transform):
    """The number of the bucket: how many boundaries are not above the value, 0 to their number.

        Feature("age", ages, transform=Bucketize([18, 30, 50]))  # 17 -> 0, 18 -> 1, 50 -> 3

    Attributes:
        boundaries: Ascending. Values of files are float32, and boundaries are compared with them as float32.
    """

    takes = "float"
    boundaries: Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.boundaries = plain_values(self.boundaries)
        if not self.boundaries:
            raise ConfigError("Bucketize: boundaries are []; give at least one")
        _check_ascending("Bucketize", self.boundaries)

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        values = inputs[0].values
        if values.dtype != np.float32:
            values = numbers_of(inputs[0], self)
        boundaries = np.asarray(self.boundaries, values.dtype)
        return inputs[0].with_values(np.searchsorted(boundaries, values, side="right"))


@dataclass
class Quantiles(FittedTransform):
    """The number of the bucket, of `count` buckets with about as many values each.

        Feature("price", prices, transform=[Log1p(), Quantiles(10)])

    Up to 65,536 values quantiles are exact, with linear interpolation; of n more, the share of the values
    below a boundary differs from the exact one by log2(n / 32768) / 65536 at most (0.0004 of 2**40 values).

    Attributes:
        count: Number of buckets. There are fewer if quantiles are equal.
        boundaries: Numbers in ascending order, or None to have `fit` compute them.
    """

    takes = "float"
    count: PositiveInt
    boundaries: Sequence[float] | None = None
    _sketch: "QuantileSketch | None" = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.boundaries is not None:
            self.boundaries = plain_values(self.boundaries)
            _check_ascending("Quantiles", self.boundaries)

    @property
    @override
    def fitted(self) -> bool:
        return self.boundaries is not None

    @override
    def observe(self, *inputs: Jagged) -> None:
        self._sketch = self._sketch or QuantileSketch()
        self._sketch.add(numbers_of(inputs[0], self))

    @override
    def finish(self) -> None:
        if self._sketch is None or not self._sketch.count:
            raise UsageError(f"{self!r} has seen no value; fit it with data that has some")
        shares = np.arange(self.count + 1) / self.count
        edges = np.unique(self._sketch.quantiles(shares))
        self.boundaries, self._sketch = edges[1:-1].tolist(), None

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        self.check_fitted()
        boundaries = np.asarray(self.boundaries, np.float64)
        values = numbers_of(inputs[0], self)
        return inputs[0].with_values(np.searchsorted(boundaries, values, side="right"))


class QuantileSketch:
    """Quantiles of many values in little memory, by the buffers of Munro and Paterson.

    Level h has at most `_BUFFER` sorted values, which stand for 2**h values each. Two full buffers become one
    of the next level: every second value of both, in turn the odd and the even ones. That changes the rank of
    any value by at most 2**h, so over all levels by at most n * levels / (2 * _BUFFER).

    Attributes:
        count: Number of values so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._fresh: list[Doubles] = []
        self._pending = 0
        self._levels: list[Doubles | None] = []
        self._odd = False

    def add(self, values: Doubles) -> None:
        """Add values, among which there is no NaN."""
        self.count += len(values)
        self._fresh.append(values.copy())
        self._pending += len(values)
        if self._pending > 2 * _BUFFER:
            fresh = np.concatenate(self._fresh)
            full = len(fresh) // _BUFFER
            for start in range(0, full * _BUFFER, _BUFFER):
                self._carry(np.sort(fresh[start : start + _BUFFER]))
            self._fresh = [fresh[full * _BUFFER :]]
            self._pending = len(self._fresh[0])

    def _carry(self, buffer: Doubles) -> None:
        for level, buffer_of_level in enumerate(self._levels):
            if buffer_of_level is None:
                self._levels[level] = buffer
                return
            self._levels[level] = None
            buffer = np.sort(np.concatenate([buffer, buffer_of_level]))[int(self._odd) :: 2]
            self._odd = not self._odd
        self._levels.append(buffer)

    def quantiles(self, shares: Doubles) -> Doubles:
        """The values below which these shares of all values are, between 0 and 1."""
        parts = [(np.concatenate(self._fresh), 1)]
        parts += [(b, 2**h) for h, b in enumerate(self._levels) if b is not None]
        if len(parts) == 1:
            return np.quantile(parts[0][0], shares)
        values = np.concatenate([values for values, _ in parts])
        weights = np.concatenate([np.full(len(values), weight) for values, weight in parts])
        order = np.argsort(values, kind="stable")
        ranks = (
            np.cumsum(weights[order]) - weights[order] / 2 - 0.5
        )  # the middle of those it stands for
        out: Doubles = np.interp(shares * (self.count - 1), ranks, values[order])
        return out
