"""Initial values of parameters, under Paddle's names.

Each is a small value whose `resolve(shape)` gives the `psfleet.core.engine.schema.table.InitializerSpec`
that tables
use: the same bits on every server and worker.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.core.base.errors import ConfigError, PsfleetError, ShapeError
from psfleet.core.base.validation.annotations import NonNegative, NonNegativeInt, check_fields
from psfleet.core.engine.schema.table import InitializerSpec

__all__ = [
    "MSRA",
    "Assign",
    "Constant",
    "ConstantInitializer",
    "Initializer",
    "MSRAInitializer",
    "Normal",
    "NormalInitializer",
    "NumpyArrayInitializer",
    "TruncatedNormal",
    "TruncatedNormalInitializer",
    "Uniform",
    "UniformInitializer",
    "Xavier",
    "XavierInitializer",
    "resolve",
    "starting",
]


@dataclass(frozen=True)
class Initializer:
    """Base of all initializers.

    Attributes:
        seed: Seed of the random numbers; 0: the program's.
    """

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)

    @property
    def own_seed(self) -> int:
        """The seed, 0 if the program's is to be used."""
        return int(getattr(self, "seed", 0))

    def resolve(self, shape: Sequence[int | None]) -> InitializerSpec:
        """The table's initializer for a parameter of this shape."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Initializer):
    """Every value is `value`."""

    value: float = 0.0
    force_cpu: bool = False

    def resolve(self, shape: Sequence[int | None]) -> InitializerSpec:
        return InitializerSpec("constant", float(self.value), 0.0)


@dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform in [low, high)."""

    low: float = -1.0
    high: float = 1.0
    seed: NonNegativeInt = 0

    def resolve(self, shape: Sequence[int | None]) -> InitializerSpec:
        if self.low > self.high:
            raise ConfigError(f"Uniform: low is {self.low!r}, above high {self.high!r}")
        return InitializerSpec("uniform", float(self.low), float(self.high))


@dataclass(frozen=True)
class Normal(Initializer):
    """Normal with mean `loc` and standard deviation `scale`."""

    loc: float = 0.0
    scale: NonNegative = 1.0
    seed: NonNegativeInt = 0

    def resolve(self, shape: Sequence[int | None]) -> InitializerSpec:
        return InitializerSpec("normal", float(self.loc), float(self.scale))


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Normal with mean `loc` and standard deviation `scale`. A value more than two standard deviations from
    the mean is drawn again."""

    loc: float = 0.0
    scale: NonNegative = 1.0
    seed: NonNegativeInt = 0

    def resolve(self, shape: Sequence[int | None]) -> InitializerSpec:
        return InitializerSpec("truncated", float(self.loc), float(self.scale))


@dataclass(frozen=True)
class Xavier(Initializer):
    """Variance 2 / (fan_in + fan_out) (Glorot and Bengio, 2010); fans of the shape if None."""

    uniform: bool = True
    fan_in: NonNegative | None = None
    fan_out: NonNegative | None = None
    seed: NonNegativeInt = 0

    def resolve(self, shape: Sequence[int | None]) -> InitializerSpec:
        fan_in = _fans(shape)[0] if self.fan_in is None else self.fan_in
        fan_out = _fans(shape)[1] if self.fan_out is None else self.fan_out
        return _spread(self.uniform, 2.0 / max(fan_in + fan_out, 1))


@dataclass(frozen=True)
class MSRA(Initializer):
    """Variance 2 / fan_in (He et al., 2015); the fan from the shape if not given."""

    uniform: bool = True
    fan_in: NonNegative | None = None
    seed: NonNegativeInt = 0

    def resolve(self, shape: Sequence[int | None]) -> InitializerSpec:
        fan_in = _fans(shape)[0] if self.fan_in is None else self.fan_in
        return _spread(self.uniform, 2.0 / max(fan_in, 1))


class Assign(Initializer):
    """The values of an array; for parameters with a known shape only, not for rows of any id."""

    def __init__(self, value: ArrayLike) -> None:
        try:
            array = np.array(value, np.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"Assign: value cannot be read as an array: {error}") from None
        object.__setattr__(self, "value", array)
        self.value: NDArray[np.float32]

    def resolve(self, shape: Sequence[int | None]) -> InitializerSpec:
        raise ConfigError(
            f"an array of shape {self.value.shape} cannot initialise a sparse table, whose rows appear "
            "by id; use Uniform, Normal or Constant, or set the rows after it is made"
        )


def resolve(
    initializer: Initializer | InitializerSpec | None, shape: Sequence[int | None]
) -> InitializerSpec:
    """Turn what a user may pass into a table's initializer; None is uniform in [-0.01, 0.01)."""
    if initializer is None:
        return InitializerSpec()
    if isinstance(initializer, InitializerSpec):
        return initializer
    if isinstance(initializer, Initializer):
        return initializer.resolve(shape)
    raise ConfigError(f"initializer is {initializer!r}; it must be one of psfleet.initializer")


def starting(
    initializer: Initializer | InitializerSpec | None,
    shape: Sequence[int | None],
    seed: int,
    owner: str,
) -> tuple[InitializerSpec, int]:
    """Return a table's initializer, and the seed: the initializer's own one if it has one.

    Args:
        owner: Owner of the first values, for messages.
    """
    try:
        spec = resolve(initializer, shape)
    except PsfleetError as error:
        raise type(error)(f"{owner}: {error}") from None
    own = initializer.own_seed if isinstance(initializer, Initializer) else 0
    return spec, own or seed


def _fans(shape: Sequence[int | None]) -> tuple[int, int]:
    """Inputs and outputs of a weight [in, out] or a filter [out, in, ...]."""
    if any(extent is None or extent < 0 for extent in shape):
        raise ShapeError(
            f"fans of the shape {tuple(shape)} are unknown; pass fan_in and fan_out, "
            "or use Uniform or Normal"
        )
    sizes = [extent for extent in shape if extent is not None]
    if len(sizes) < 2:
        return (sizes or [1])[0], (sizes or [1])[0]
    if len(sizes) == 2:
        return sizes[0], sizes[1]
    field = math.prod(sizes[2:])
    return sizes[1] * field, sizes[0] * field


def _spread(uniform: bool, variance: float) -> InitializerSpec:
    if uniform:
        limit = math.sqrt(3.0 * variance)
        return InitializerSpec("uniform", -limit, limit)
    return InitializerSpec("normal", 0.0, math.sqrt(variance))


ConstantInitializer = Constant
UniformInitializer = Uniform
NormalInitializer = Normal
TruncatedNormalInitializer = TruncatedNormal
XavierInitializer = Xavier
MSRAInitializer = MSRA
NumpyArrayInitializer = Assign
