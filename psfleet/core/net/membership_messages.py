"""Between consistency modes, views, reports and plans and their messages.

A mode travels as its number and the settings of servers. The messages that hold one have the same three
fields: `mode`, `staleness` with the first of these settings, and `mode_settings` with the others."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, FrameError, ShapeError
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.consistency import MODES, NO_MODE, ConsistencyMode, find_mode
from psfleet.core.engine.round_plan import PlanEntry
from psfleet.core.net.v1 import membership_pb2, shard_pb2

Change = NDArray[np.int64]


class ModeFields(Protocol):
    """Mode fields of a message."""

    mode: Any
    staleness: int

    @property
    def mode_settings(self) -> Any: ...


def write_mode(mode: Mode | None) -> shard_pb2.Mode:
    """Return the number of a mode in messages; None: no worker has joined."""
    return cast(shard_pb2.Mode, find_mode(mode).number)


def read_mode(number: int) -> Mode:
    """Return the mode that a message names."""
    return cast(Mode, _numbered(number).name)


def mode_fields(mode: ConsistencyMode) -> dict[str, Any]:
    """Return the fields of a message that say a mode."""
    first, *more = mode.agreed_settings.values() or (0,)
    return {"mode": mode.number, "staleness": first, "mode_settings": more}


def read_mode_fields(message: ModeFields) -> ConsistencyMode:
    """Return the mode that the fields of a message say.

    Raises:
        FrameError: It is unknown, or has no such settings.
    """
    return _with(message.mode, [message.staleness, *message.mode_settings])


def agreed_numbers(mode: ConsistencyMode) -> tuple[int, ...]:
    """Return a mode as logs and snapshots hold it: its number, then the settings that servers know."""
    return (mode.number, *mode.agreed_settings.values())


def read_agreed_numbers(numbers: Sequence[int]) -> ConsistencyMode:
    """Return the mode that `agreed_numbers` wrote. Number 0 stands for a fleet that no worker has joined.

    Raises:
        FrameError: It is unknown, or has no such settings.
    """
    number, *settings = numbers or (0,)
    return _with(number, settings) if number else NO_MODE


def write_plan_entry(entry: PlanEntry) -> membership_pb2.PlanEntry:
    """Return the message of an entry of a round plan."""
    return membership_pb2.PlanEntry(
        first=entry.first, seats=entry.seats, stream=write_pairs(entry.stream)
    )


def read_plan_entry(message: membership_pb2.PlanEntry) -> PlanEntry:
    """Return the entry of a round plan that a message brings.

    Raises:
        FrameError: A range has no end.
    """
    return PlanEntry(message.first, tuple(message.seats), read_pairs(message.stream))


def write_pairs(pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Make one list of pairs, one after the other."""
    return [number for pair in pairs for number in pair]


def read_pairs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Make the pairs that `write_pairs` wrote.

    Raises:
        FrameError: One has no second number.
    """
    if len(numbers) % 2:
        raise FrameError(f"ranges are pairs of positions; there are {len(numbers)} of them")
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def write_change(mode: ConsistencyMode, last: int) -> Change:
    """Return a worker's part in a change of the mode.

    Args:
        mode: In which it wants to go on: a number m, and settings s (0 if it has none).
        last: Its last push n.

    Returns:
        [m, s..., -m, -s..., n]. Of the maxima over the workers the first half and the second are opposite if
        all want the same.
    """
    numbers = [mode.number, *(mode.agreed_settings.values() or (0,))]
    return np.array([*numbers, *(-each for each in numbers), last], np.int64)


def combined_changes(one: Change, other: Change) -> Change:
    """Return the maxima of what workers bring; of modes with unequal numbers of settings, the longer form."""
    one, other = (_widened(each, max(len(one), len(other))) for each in (one, other))
    return np.maximum(one, other)


def _widened(change: Change, size: int) -> Change:
    half, more = len(change) // 2, (size - len(change)) // 2
    no_setting = np.full(more, -1)  # below every setting: a worker that has one wants another mode
    parts = (change[:half], no_setting, change[half:-1], -no_setting, change[-1:])
    return np.concatenate(parts).astype(np.int64)


def read_change(change: Change) -> tuple[ConsistencyMode | None, int]:
    """Return the mode that all want, None if they want different things; and the highest push of any.

    Raises:
        ShapeError: It is no change.
        FrameError: Its mode is unknown.
    """
    if change.dtype != np.int64 or change.ndim != 1 or len(change) < 5 or len(change) % 2 == 0:
        raise ShapeError(
            f"a change of the mode is five int64 or more, not {change.dtype.name} of shape {change.shape}"
        )
    half = len(change) // 2
    if (change[:half] != -change[half:-1]).any():
        return None, int(change[-1])
    return _with(int(change[0]), [int(each) for each in change[1:half]]), int(change[-1])


def _numbered(number: int) -> ConsistencyMode:
    for mode in MODES.values():
        if mode.number == number:
            return mode
    names = ", ".join(f"{name} ({mode.number})" for name, mode in MODES.items())
    raise FrameError(f"mode {number} is unknown; this server knows {names}")


def _with(number: int, values: list[int]) -> ConsistencyMode:
    mode = _numbered(number)
    if any(values[len(mode.agreed_settings) :]):
        raise FrameError(
            f"mode {mode.name!r} comes with the settings {values}; "
            f"servers know {[*mode.agreed_settings]} of it"
        )
    try:
        return mode.agreed(*values)
    except ConfigError as error:
        raise FrameError(str(error)) from None
