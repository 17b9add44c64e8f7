"""Transforms of numbers: Log1p, Clip, Normalize, MinMax, Bucketize and Quantiles.

All values are first rounded to float32, so that results are bit-identical for every source of the values.
NumPy then computes in float64. Only Bucketize and Quantiles compare float32 with float32.
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

_BUFFER = 1 << 15  # values in a full buffer of the sketch


@dataclass
class Log1p(Transform):
    """Takes the natural logarithm of 1 + x, for values such as counts and prices.

        Number("price", transform=Log1p())  # 0 -> 0, 1.718 -> 1

    Values of -1 or below are refused.
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
    """Limits values to the range from `low` to `high`.

        Number("age", transform=Clip(0, 100))  # 150 -> 100

    A limit of None means no limit.
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
    """Standardizes values: (x - mean) / std.

        Number("price", transform=[Log1p(), Normalize()])

    Attributes:
        mean, std: Mean and population standard deviation. None means that `fit` computes them, in float64.
            If all values are equal, std is 1.
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
        # Chan's update of mean and sum of squares: the sums of x and x**2 would lose digits for a large mean.
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
    """Scales values to the range from 0 to 1: the smallest value becomes 0 and the largest 1.

        Number("age", transform=MinMax())

    Values outside the range become 0 or 1.

    Attributes:
        low, high: Smallest and largest value. None means that `fit` finds them.
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


def _bucket_numbers(bags: Jagged, owner: Transform, boundaries: Sequence[float]) -> Jagged:
    """Replace each value by the number of boundaries that are not above it."""
    # 0.7 of a file is float32(0.7), which is below the float64 0.7: compare it with float32(0.7).
    values = bags.values if bags.values.dtype == np.float32 else numbers_of(bags, owner)
    edges = np.asarray(boundaries, values.dtype)
    return bags.with_values(np.searchsorted(edges, values, side="right"))


@dataclass
class Bucketize(Transform):
    """Replaces each value by the number of its bucket, which is the number of boundaries that are not above
    the value.

        Feature("age", ages, transform=Bucketize([18, 30, 50]))  # 17 -> 0, 18 -> 1, 50 -> 3

    Attributes:
        boundaries: Boundaries between buckets, in ascending order. They are rounded to float32, because
            values in files are float32 too.
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
        return _bucket_numbers(inputs[0], self, self.boundaries)


@dataclass
class Quantiles(FittedTransform):
    """Replaces each value by the number of its bucket, of `count` buckets with about equally many values.

        Feature("price", prices, transform=[Log1p(), Quantiles(10)])

    For up to 65,536 values, `fit` computes exact quantiles with linear interpolation. For a
    larger number n of values, the share of the values below a boundary is wrong by at most
    log2(n / 32768) / 65536 (0.0004 for 2**40 values).

    Attributes:
        count: Number of buckets. There are fewer if quantiles are equal.
        boundaries: Boundaries in ascending order. None means that `fit` computes them.
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
        assert self.boundaries is not None
        return _bucket_numbers(inputs[0], self, self.boundaries)


class QuantileSketch:
    """Approximate quantiles of many values in little memory, by the method of Munro and Paterson.

    There are buffers of `_BUFFER` sorted values in levels. A value in a buffer of level h represents 2**h
    values. Two full buffers are merged into one of the next level that keeps every second value,
    alternately the odd and the even ones. A merge changes the rank of any value by at most 2**h, so all
    merges together by at most n * levels / (2 * _BUFFER).

    Attributes:
        count: Number of values that were added.
    """

    def __init__(self) -> None:
        self.count = 0
        self._fresh: list[Doubles] = []
        self._pending = 0
        self._levels: list[Doubles | None] = []
        self._odd = False

    def add(self, values: Doubles) -> None:
        """Add values, which must not contain NaN."""
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
        # Levels fill up like the digits of a binary counter: two full buffers give one of the next level.
        for level, buffer_of_level in enumerate(self._levels):
            if buffer_of_level is None:
                self._levels[level] = buffer
                return
            self._levels[level] = None
            buffer = np.sort(np.concatenate([buffer, buffer_of_level]))[int(self._odd) :: 2]
            self._odd = not self._odd
        self._levels.append(buffer)

    def quantiles(self, shares: Doubles) -> Doubles:
        """Return the quantiles: for each share between 0 and 1, the value below which this share of all
        values lies.
        """
        parts = [(np.concatenate(self._fresh), 1)]
        parts += [(b, 2**h) for h, b in enumerate(self._levels) if b is not None]
        if len(parts) == 1:
            return np.quantile(parts[0][0], shares)
        values = np.concatenate([values for values, _ in parts])
        weights = np.concatenate([np.full(len(values), weight) for values, weight in parts])
        order = np.argsort(values, kind="stable")
        ranks = (
            np.cumsum(weights[order]) - weights[order] / 2 - 0.5
        )  # the middle of the ranks that a value represents
        out: Doubles = np.interp(shares * (self.count - 1), ranks, values[order])
        return out
