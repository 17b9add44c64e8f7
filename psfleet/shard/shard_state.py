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

from psfleet.shard.plain_state import from_plain, to_plain

__all__ = ["Core", "dataclasses_of", "read_core", "write_core"]

_OUTSIDE = {
    "index",  # who the shard is
    "server",
    "servers",
    "count",
    "tables",  # parts of the shard, each read by itself; the tables' content is kept as arrays
    "workers",
    "consistency",
    "journal",  # what is around it
    "budget",
    "counters",  # for displays
    "staleness",
    "stale_gradients",  # corrects pushes before they are recorded
    "view",  # the coordinator installs one on every shard that starts
    "promised",
    "frozen",
    "refused",
    "moments",  # of use for this process only
    "waits_for_room",
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


def read_core(parts: Iterable[object], outside: Iterable[str] = _OUTSIDE) -> Core:
    """The value of what a shard is now, whose parts keep their fields under names of their own.

    Nothing that changes later is in it.
    """
    arrays: list[NDArray[Any]] = []
    fields: dict[str, Any] = {}
    for part in parts:
        kept = {name: value for name, value in vars(part).items() if name not in outside}
        assert not kept.keys() & fields.keys(), f"two parts of a shard keep {kept.keys()}"
        fields |= {name: to_plain(value, arrays) for name, value in kept.items()}
    return Core(fields, [np.array(array) for array in arrays])


def write_core(
    parts: Iterable[object], core: Core, classes: Iterable[type], outside: Iterable[str] = _OUTSIDE
) -> None:
    """Make the parts of a shard what those of another were; fields that only they have stay.

    Args:
        classes: Dataclasses of which there may be values in it.

    Raises:
        CheckpointError: The value is not one of a shard.
    """
    known = tuple(classes)
    owners = {name: part for part in parts for name in set(vars(part)) - set(outside)}
    for name, plain in core.fields.items():
        if name in owners:
            setattr(owners[name], name, from_plain(plain, core.arrays, known))


def dataclasses_of(module: ModuleType) -> list[type]:
    """The dataclasses that a module defines."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and dataclasses.is_dataclass(value)
        and value.__module__ == module.__name__
    ]
