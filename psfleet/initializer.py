"""Initializers: rules for the initial values of parameters, under Paddle's names.

    layers.fc(x, 64, param_attr=psfleet.ParamAttr(initializer=psfleet.initializer.Normal(0.0, 0.01)))

An initializer is a small object. Its method `resolve(shape)` returns the
`psfleet.core.engine.schema.table.InitializerSpec` of a table. From it every server and worker computes
bit-identical initial values.
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
        seed: Seed of the random numbers, in subclasses that have one. 0 means the program's seed.
    """

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)

    @property
    def own_seed(self) -> int:
        """Seed of this initializer, or 0 to use the program's seed."""
        return int(getattr(self, "seed", 0))

    def resolve(self, shape: Sequence[int | None]) -> InitializerSpec:
        """Return the table's initializer for a parameter.

        Args:
            shape: Shape of the parameter. None is an unknown extent, such as the rows of a sparse table.

        Raises:
            ShapeError: The initializer needs an extent that is unknown.
            ConfigError: The initializer's arguments are wrong or do not fit the parameter.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Initializer):
    """Sets every weight to `value`. `force_cpu` is accepted for Paddle scripts, without effect."""

    value: float = 0.0
    force_cpu: bool = False

    def resolve(self, shape: Sequence[int | None]) -> InitializerSpec:
        return InitializerSpec("constant", float(self.value), 0.0)


@dataclass(frozen=True)
class Uniform(Initializer):
    """Random weights, uniform in [low, high)."""

    low: float = -1.0
    high: float = 1.0
    seed: NonNegativeInt = 0

    def resolve(self, shape: Sequence[int | None]) -> InitializerSpec:
        if self.low > self.high:
            raise ConfigError(f"Uniform: low is {self.low!r}, above high {self.high!r}")
        return InitializerSpec("uniform", float(self.low), float(self.high))


@dataclass(frozen=True)
class Normal(Initializer):
    """Random weights with a normal distribution of mean `loc` and standard deviation `scale`."""

    loc: float = 0.0
    scale: NonNegative = 1.0
    seed: NonNegativeInt = 0

    def resolve(self, shape: Sequence[int | None]) -> InitializerSpec:
        return InitializerSpec("normal", float(self.loc), float(self.scale))


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Random weights with a normal distribution of mean `loc` and standard deviation `scale`.

    A value more than two standard deviations from the mean is drawn again.
    """

    loc: float = 0.0
    scale: NonNegative = 1.0
    seed: NonNegativeInt = 0

    def resolve(self, shape: Sequence[int | None]) -> InitializerSpec:
        return InitializerSpec("truncated", float(self.loc), float(self.scale))


@dataclass(frozen=True)
class Xavier(Initializer):
    """Random weights with variance 2 / (fan_in + fan_out) (Glorot and Bengio, 2010).

    Args:
        uniform: True for a uniform distribution, False for a normal one.
        fan_in, fan_out: Numbers of inputs and outputs of the layer. None derives them from the parameter's
            shape.
        seed: Seed of the random numbers. 0 means the program's seed.
    """

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
    """Random weights with variance 2 / fan_in (He et al., 2015).

    Args:
        uniform: True for a uniform distribution, False for a normal one.
        fan_in: Number of inputs of the layer. None derives it from the parameter's shape.
        seed: Seed of the random numbers. 0 means the program's seed.
    """

    uniform: bool = True
    fan_in: NonNegative | None = None
    seed: NonNegativeInt = 0

    def resolve(self, shape: Sequence[int | None]) -> InitializerSpec:
        fan_in = _fans(shape)[0] if self.fan_in is None else self.fan_in
        return _spread(self.uniform, 2.0 / max(fan_in, 1))


class Assign(Initializer):
    """Sets the weights to the values of an array. Only for dense parameters with the array's shape."""

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
    """Return the table's initializer for an argument of a script.

    Args:
        initializer: Argument of the script. None means uniform in [-0.01, 0.01).
        shape: Shape of the parameter, with None for unknown extents.
    """
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
    """Return a table's initializer and seed for an argument of a script.

    Args:
        initializer: Argument of the script, as for `resolve`.
        shape: Shape of the parameter, with None for unknown extents.
        seed: Seed of the program, which is returned if the initializer has no seed.
        owner: Name of the parameter, for messages.
    """
    try:
        spec = resolve(initializer, shape)
    except PsfleetError as error:
        raise type(error)(f"{owner}: {error}") from None
    initializer_seed = initializer.own_seed if isinstance(initializer, Initializer) else 0
    return spec, initializer_seed or seed


def _fans(shape: Sequence[int | None]) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a layer with a weight [in, out] or a filter [out, in,
    ...]."""
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
