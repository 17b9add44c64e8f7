"""Converts consistency modes, round plans and mode switches to fields of messages and back.

A mode is sent as its number and those of its settings that servers know. Every message that holds a mode
has the same three fields: `mode`, `staleness` with the first of these settings, and `mode_settings` with
the remaining ones.

A round plan says which samples each worker gets in which round of sync mode. Workers agree on a mode switch
in an all-reduce; `write_change` returns one worker's input for it.
"""

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
    """A message with the three fields of a mode."""

    mode: Any
    staleness: int

    @property
    def mode_settings(self) -> Any: ...


def write_mode(mode: Mode | None) -> shard_pb2.Mode:
    """Return the number of a mode in messages. None, which means that no worker has joined, is number 0."""
    return cast(shard_pb2.Mode, find_mode(mode).number)


def read_mode(number: int) -> Mode:
    """Return the name of the mode with this number.

    Raises:
        FrameError: The number is unknown.
    """
    return cast(Mode, _numbered(number).name)


def mode_fields(mode: ConsistencyMode) -> dict[str, Any]:
    """Return a mode as the three fields of a message."""
    first, *later_settings = mode.agreed_settings.values() or (0,)
    return {"mode": mode.number, "staleness": first, "mode_settings": later_settings}


def read_mode_fields(message: ModeFields) -> ConsistencyMode:
    """Return the mode that a message's three fields describe.

    Raises:
        FrameError: The mode is unknown, or does not have these settings.
    """
    return _with(message.mode, [message.staleness, *message.mode_settings])


def agreed_numbers(mode: ConsistencyMode) -> tuple[int, ...]:
    """Return a mode as stored in logs and snapshots: its number, then those settings that servers know."""
    return (mode.number, *mode.agreed_settings.values())


def read_agreed_numbers(numbers: Sequence[int]) -> ConsistencyMode:
    """Return the mode for numbers that `agreed_numbers` has returned.

    Number 0 means that no worker has joined.

    Raises:
        FrameError: The mode is unknown, or does not have these settings.
    """
    number, *settings = numbers or (0,)
    return _with(number, settings) if number else NO_MODE


def write_plan_entry(entry: PlanEntry) -> membership_pb2.PlanEntry:
    """Return the message for an entry of a round plan: who shares which samples from some round on."""
    return membership_pb2.PlanEntry(
        first=entry.first, seats=entry.seats, stream=write_pairs(entry.stream)
    )


def read_plan_entry(message: membership_pb2.PlanEntry) -> PlanEntry:
    """Return the entry of a round plan (who shares which samples from some round on) that a message holds.

    Raises:
        FrameError: A range of samples has a start but no end.
    """
    return PlanEntry(message.first, tuple(message.seats), read_pairs(message.stream))


def write_pairs(pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Flatten pairs into one list: (a, b), (c, d) becomes [a, b, c, d]."""
    return [number for pair in pairs for number in pair]


def read_pairs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the pairs that `write_pairs` flattened.

    Raises:
        FrameError: The list has an odd length.
    """
    if len(numbers) % 2:
        raise FrameError(f"ranges are pairs of positions; there are {len(numbers)} of them")
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def write_change(mode: ConsistencyMode, last: int) -> Change:
    """Return one worker's input for the all-reduce in which all workers agree on a mode switch.

    The all-reduce takes the maximum of each element over all workers. Each setting is sent as x and as -x,
    whose maximum is minus the minimum of x. So the second half of the result is the exact negative of the
    first half only if every worker sent the same mode and settings.

    Args:
        mode: Mode that the worker wants to switch to, with number m and settings s (0 if it has none).
        last: Number n of the worker's last push.

    Returns:
        int64 array [m, s..., -m, -s..., n].
    """
    numbers = [mode.number, *(mode.agreed_settings.values() or (0,))]
    return np.array([*numbers, *(-number for number in numbers), last], np.int64)


def combined_changes(one: Change, other: Change) -> Change:
    """Return the elementwise maximum of two inputs of `write_change`. The shorter array is padded first."""
    one, other = (_widened(change, max(len(one), len(other))) for change in (one, other))
    return np.maximum(one, other)


def _widened(change: Change, size: int) -> Change:
    half, missing_count = len(change) // 2, (size - len(change)) // 2
    # -1 is below every setting. So a worker without this setting never agrees with a worker that has it.
    no_setting = np.full(missing_count, -1)
    parts = (change[:half], no_setting, change[half:-1], -no_setting, change[-1:])
    return np.concatenate(parts).astype(np.int64)


def read_change(change: Change) -> tuple[ConsistencyMode | None, int]:
    """Return the mode that all workers want, and the highest push number of any worker.

    Args:
        change: Result of the all-reduce (see `write_change`).

    Returns:
        The mode, or None if the workers want different modes or settings.
        The highest number of a push that any worker has made.

    Raises:
        ShapeError: The array is not the result of such an all-reduce.
        FrameError: The mode is unknown.
    """
    if change.dtype != np.int64 or change.ndim != 1 or len(change) < 5 or len(change) % 2 == 0:
        raise ShapeError(
            f"a change of the mode is five int64 or more, not {change.dtype.name} of shape {change.shape}"
        )
    half = len(change) // 2
    if (change[:half] != -change[half:-1]).any():
        return None, int(change[-1])
    return _with(int(change[0]), [int(setting) for setting in change[1:half]]), int(change[-1])


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
