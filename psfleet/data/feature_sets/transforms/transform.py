"""Base classes of transforms: Transform, FittedTransform (with statistics) and Function (of a user's).

A transform takes and returns a `Jagged`, all samples of a batch at once. Several threads of a service may
call it at the same time.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.validation.annotations import check_fields
from psfleet.data.feature_sets.jagged import Jagged, as_plain
from psfleet.data.feature_sets.value_types import Dtype, as_typed

Doubles = NDArray[np.float64]
MANY = 1 << 10  # inputs


@dataclass
class Transform(ABC):
    """A function from the values of a batch to others. Its fields are its arguments, and what JSON has of it.

    Attributes:
        takes: Type of the values that the transform needs, or None for any type.
        arity: Smallest and largest number of inputs.
    """

    takes: ClassVar[Dtype | None] = None
    arity: ClassVar[tuple[int, int]] = (1, 1)

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)

    @abstractmethod
    def __call__(self, *inputs: Jagged) -> Jagged:
        """Return the transformed values, of the same number of samples."""


@dataclass
class FittedTransform(Transform):
    """A transform with fields that a first pass over the data computes, see `FeatureSet.fit`."""

    @property
    @abstractmethod
    def fitted(self) -> bool:
        """True if all statistics are there, given or computed."""

    def begin(self) -> None:
        """Reset the fields that are not arguments, in which a failed earlier pass may have left values."""
        for part in fields(self):
            if not part.init:
                make = part.default_factory
                setattr(self, part.name, part.default if make is MISSING else make())

    @abstractmethod
    def observe(self, *inputs: Jagged) -> None:
        """Add the values of one batch of the first pass."""

    @abstractmethod
    def finish(self) -> None:
        """End the first pass.

        Raises:
            UsageError: The values that were added are not enough.
        """

    def check_fitted(self) -> None:
        """Refuse to transform before the first pass.

        Raises:
            UsageError: `fit` has not been called.
        """
        if not self.fitted:
            raise UsageError(
                f"{self!r} has seen no data; call fit(batches) or load_statistics(path) of the feature set"
            )


@dataclass
class Function(Transform):
    """A function of a user's: from one `Jagged` for each input to a `Jagged`, or to as many values, [n].

        Number("age", transform=lambda age: np.sqrt(age.values))

    Attributes:
        function: The function. Files do not hold it.
    """

    arity = (1, MANY)
    function: Callable[..., Any]

    @override
    def __call__(self, *inputs: Jagged) -> Jagged:
        output = self.function(*inputs)
        if not isinstance(output, Jagged):
            values = as_plain(output)
            if values.shape != inputs[0].values.shape:
                raise UsageError(
                    f"{self.name} gave values of shape {values.shape} for {len(inputs[0].values)} values; "
                    "return as many, or a Jagged"
                )
            output = inputs[0].with_values(values)
        if len(output) != len(inputs[0]):
            raise UsageError(
                f"{self.name} gave {len(output)} samples of {len(inputs[0])}; return as many"
            )
        return output

    @property
    def name(self) -> str:
        """Name of the function, for messages."""
        return getattr(self.function, "__qualname__", repr(self.function))


def plain_values(values: Iterable[Any]) -> list[Any]:
    """Return the values with NumPy's scalars as Python's, which JSON can write."""
    return [value.item() if isinstance(value, np.generic) else value for value in values]


def texts_or_ints(owner: str, values: Iterable[Any]) -> list[str | int]:
    """The values of an argument, which are texts, bytes in UTF-8, or whole numbers.

    Raises:
        ConfigError: One is something else, such as NaN.
    """
    plain = plain_values(values)
    for index, value in enumerate(plain):
        with contextlib.suppress(UnicodeDecodeError):
            plain[index] = value.decode() if isinstance(value, bytes) else value
        if isinstance(value, bool) or not isinstance(plain[index], str | int):
            raise ConfigError(
                f"{owner} has {value!r:.80}, which is neither a text nor a whole number; leave it out"
            )
    return plain


def transforms_of(transforms: Any) -> tuple[Transform, ...]:
    """Return the transforms of an argument, which may be one or a list, as a tuple.

    Raises:
        ConfigError: One is neither a transform nor a function.
    """
    members = transforms if isinstance(transforms, list | tuple) else [transforms]
    for item in members:
        if not callable(item) or isinstance(item, type):
            raise ConfigError(
                f"transform has {item!r:.80}; it must be an object of psfleet.features, such as Log1p(), or "
                "a function"
            )
    return tuple(item if isinstance(item, Transform) else Function(item) for item in members)


def numbers_of(bags: Jagged, owner: Transform) -> Doubles:
    """The values as float64.

    Raises:
        IdError: A value is no number.
    """
    if bags.values.dtype.kind not in "iuf":
        bags = as_typed(type(owner).__name__, bags, "float")
    return bags.values.astype(np.float64, copy=False)
