"""What a shard is beside its tables, as a value: for snapshots.

A field of a shard belongs to it unless it is named here, so that a new one cannot be forgotten; one
that a snapshot cannot hold is an error when the snapshot is taken.
"""

import dataclasses
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.shard.plain import from_plain, to_plain

__all__ = ["Core", "dataclasses_of", "read_core", "write_core"]

_OUTSIDE = {
    "index",  # who the shard is
    "servers",
    "workers",
    "tables",  # kept as arrays
    "journal",  # what is around it
    "budget",
    "counters",  # for displays
    "staleness",
    "view",  # the coordinator installs one on every shard that starts
    "promised",
    "frozen",
    "refused",
    "moments",  # of use for this process only
    "_replaying",
    "_parked",  # calls wait for this process only; their workers send them again
}


@dataclasses.dataclass(frozen=True)
class Core:
    """Attributes:
    fields: JSON; arrays in it are numbers in `arrays`.
    """

    fields: dict[str, Any]
    arrays: list[NDArray[Any]]


def read_core(shard: object, outside: Iterable[str] = _OUTSIDE) -> Core:
    """The value of what a shard is now. Nothing that changes later is in it."""
    arrays: list[NDArray[Any]] = []
    kept = {name: value for name, value in vars(shard).items() if name not in outside}
    fields = {name: to_plain(value, arrays) for name, value in kept.items()}
    return Core(fields, [np.array(array) for array in arrays])


def write_core(
    shard: object, core: Core, classes: Iterable[type], outside: Iterable[str] = _OUTSIDE
) -> None:
    """Make a shard what another one was; fields that only it has stay as they are.

    Args:
        classes: Dataclasses of which there may be values in it.

    Raises:
        CheckpointError: The value is not one of a shard.
    """
    known = tuple(classes)
    own = set(vars(shard)) - set(outside)
    for name, plain in core.fields.items():
        if name in own:
            setattr(shard, name, from_plain(plain, core.arrays, known))


def dataclasses_of(module: ModuleType) -> list[type]:
    """The dataclasses that a module defines."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and dataclasses.is_dataclass(value)
        and value.__module__ == module.__name__
    ]
