"""Between consistency modes, views, reports and plans and their messages.

A mode travels as its number and the settings of servers. The messages that hold one have the same three
fields: `mode`, `staleness` with the first of these settings, and `mode_settings` with the others."""

from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, FrameError, ShapeError
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.consistency import MODES, ConsistencyMode, find_mode
from psfleet.core.engine.round_plan import PlanEntry
from psfleet.core.engine.shard.membership_view import InstallView, ViewReport
from psfleet.core.net.message_converter import Converter, SpreadCodec
from psfleet.core.net.v1 import membership_pb2, shard_pb2

Change = NDArray[np.int64]


INSTALL = Converter(InstallView, membership_pb2.InstallRequest, others=("boot",))
PLAN_ENTRY = Converter(PlanEntry, membership_pb2.PlanEntry)


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


MODE = SpreadCodec(
    ConsistencyMode,
    frozenset({"mode", "staleness", "mode_settings"}),
    mode_fields,
    read_mode_fields,
)


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


def write_report(report: ViewReport) -> membership_pb2.Standing:
    """Return the message of a report."""
    return membership_pb2.Standing(
        mode=report.mode,
        closed=report.closed,
        seats=[
            membership_pb2.SeatStanding(
                worker=worker,
                incarnation=incarnation,
                committed=report.committed.get(worker, 0),
                rests=report.rests.get(worker, 0),
                left=worker in report.left,
                sequence=report.sequences.get(worker, 0),
                leases=report.positions.get(worker, (0, 0))[0],
                samples=report.positions.get(worker, (0, 0))[1],
                progress=report.progress.get(worker, ""),
                addressed=report.addressed.get(worker, ()),
            )
            for worker, incarnation in sorted(report.incarnations.items())
        ],
    )


def read_report(message: membership_pb2.Standing) -> ViewReport:
    """Return the report that a message brings."""
    seats = {seat.worker: seat for seat in message.seats}
    return ViewReport(
        message.mode,
        message.closed,
        {worker: seat.incarnation for worker, seat in seats.items()},
        {worker: seat.committed for worker, seat in seats.items()},
        {worker: seat.rests for worker, seat in seats.items()},
        frozenset(worker for worker, seat in seats.items() if seat.left),
        {worker: seat.sequence for worker, seat in seats.items()},
        {worker: (seat.leases, seat.samples) for worker, seat in seats.items()},
        {worker: seat.progress for worker, seat in seats.items() if seat.progress},
        {worker: tuple(seat.addressed) for worker, seat in seats.items() if seat.addressed},
    )
