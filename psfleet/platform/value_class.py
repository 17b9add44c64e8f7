"""Value classes: for small values of which each call makes a dozen."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

__all__ = ["value_class"]

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value_class(cls: type[T]) -> type[T]:
    """Make a dataclass with slots and a hash, whose values nobody changes.

    Only type checkers make sure of that: a frozen dataclass takes eight times as long to make, 5 us
    instead of 0.6 for a push.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
