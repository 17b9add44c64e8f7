"""Numbers that become other numbers: logarithm, limits, and scales from statistics of the data."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from psfleet.errors import ConfigError, UsageError
from psfleet.feature_sets.jagged import Jagged
from psfleet.feature_sets.transforms.transform import FittedTransform, Transform, numbers_of


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
    """Values below `low` become it, and values above `high` that. None: no such limit.

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
        mean, std: Mean and standard deviation of the population; None: `fit` computes them, in float64. If
            all values are alike, std is 1.
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
        total, own = count + len(values), float(values.mean())
        squares += float(np.square(values - own).sum())
        squares += (own - mean) ** 2 * count * len(values) / total
        self._seen = total, mean + (own - mean) * len(values) / total, squares

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
        low, high: The least and the largest value; None: `fit` finds them.
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
