"""Base classes of transforms: Transform, FittedTransform (with statistics) and Function (written by a user).

A transform takes and returns `Jagged`, with all samples of a batch at once. Several threads of a service
may call a transform at the same time.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
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
MANY = 1 << 10  # maximum number of inputs of transforms without a limit of their own


@dataclass
class Transform(ABC):
    """Function from the values of a batch to new values. Its dataclass fields are its arguments, which JSON
    stores.

    Attributes:
        takes: Type that the values must have, or None for any type.
        arity: Minimum and maximum number of inputs.
    """

    takes: ClassVar[Dtype | None] = None
    arity: ClassVar[tuple[int, int]] = (1, 1)

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)

    @abstractmethod
    def __call__(self, *inputs: Jagged) -> Jagged:
        """Return the transformed values. The number of samples must not change."""


@dataclass
class FittedTransform(Transform):
    """Transform with statistics, which `FeatureSet.fit` computes in a first pass over the data."""

    @property
    @abstractmethod
    def fitted(self) -> bool:
        """True if all statistics are known, whether passed or computed."""

    def begin(self) -> None:
        """Start a first pass. Clears all fields that are not arguments, because a failed earlier pass may
        have left values.
        """
        for part in fields(self):
            if not part.init:
                make = part.default_factory
                setattr(self, part.name, part.default if make is MISSING else make())

    @abstractmethod
    def observe(self, *inputs: Jagged) -> None:
        """Take the values of one batch of the first pass into account."""

    @abstractmethod
    def finish(self) -> None:
        """End the first pass and store the statistics.

        Raises:
            UsageError: The pass had too few values.
        """

    def check_fitted(self) -> None:
        """Raise an error if the statistics are not known yet.

        Raises:
            UsageError: `fit` has not been called.
        """
        if not self.fitted:
            raise UsageError(
                f"{self!r} has seen no data; call fit(batches) or load_statistics(path) of the feature set"
            )


@dataclass
class Function(Transform):
    """Transform by a user's function.

    The function takes one `Jagged` (values, and their number in each sample) for each input. It returns a
    `Jagged`, or an array of equally many values.

        Number("age", transform=lambda age: np.sqrt(age.values))

    Attributes:
        function: The function. It cannot be stored in files.
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
        """Name of the function, for error messages."""
        return getattr(self.function, "__qualname__", repr(self.function))


def objects(values: Sequence[Any]) -> NDArray[Any]:
    """Return an array of Python objects. Without this, NumPy would convert numbers and lists."""
    return np.fromiter(values, object, len(values))


def plain_values(values: Iterable[Any]) -> list[Any]:
    """Return the values with NumPy's scalars converted to Python's, which JSON can write."""
    return [value.item() if isinstance(value, np.generic) else value for value in values]


def texts_or_ints(owner: str, values: Iterable[Any]) -> list[str | int]:
    """Return the values of an argument, each of which must be a text, UTF-8 bytes or an integer.

    Raises:
        ConfigError: A value has another type or is NaN, for example.
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
    """Return the argument `transform`, a single transform or a list, as a tuple of transforms.

    Raises:
        ConfigError: An element is neither a transform nor a function.
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
    """Return the values of a Jagged as float64.

    Raises:
        IdError: A value is not a number.
    """
    if bags.values.dtype.kind not in "iuf":
        bags = as_typed(type(owner).__name__, bags, "float")
    return bags.values.astype(np.float64, copy=False)
