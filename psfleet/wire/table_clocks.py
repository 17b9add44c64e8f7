"""Between what a table knows of time and how it is stored: in headers of snapshots, and in logs."""

from collections.abc import Iterable
from typing import Any

from psfleet.formats.document import exact
from psfleet.tables.row_data import TableClock
from psfleet.wire.v1 import log_pb2

__all__ = ["clock_message", "clock_to_json", "furthest", "read_clock", "read_clock_message"]

_MOST = 2**62


def clock_to_json(clock: TableClock) -> dict[str, Any]:
    """The clock in a document."""
    return {"step": clock.step, "shrinks": clock.shrinks, "ticks": clock.ticks}


def read_clock(said: Any) -> TableClock:
    """The clock that a document holds.

    Raises:
        ValueError: It is none.
    """
    step, shrinks, ticks = exact(said, "clock", step=int, shrinks=list, ticks=list)
    numbers = [step, *shrinks, *(int(at) for _, at in ticks), *(int(t) for t, _ in ticks)]
    if not all(isinstance(number, int) and 0 <= number <= _MOST for number in numbers):
        raise ValueError(f"clock {step!r}, {shrinks!r}, {ticks!r}")
    return TableClock(step, tuple(shrinks), tuple((float(t), int(at)) for t, at in ticks))


def clock_message(clock: TableClock) -> log_pb2.TableClock:
    """The clock in a record of a log."""
    ticks = [log_pb2.TableTick(seconds=seconds, step=step) for seconds, step in clock.ticks]
    return log_pb2.TableClock(step=clock.step, shrinks=clock.shrinks, ticks=ticks)


def read_clock_message(message: log_pb2.TableClock) -> TableClock:
    """The clock that a record holds."""
    ticks = tuple((tick.seconds, tick.step) for tick in message.ticks)
    return TableClock(message.step, tuple(message.shrinks), ticks)


def furthest(clocks: Iterable[TableClock]) -> TableClock:
    """Of a table's clocks on several servers the furthest: by updates, then by shrinks, then by time."""
    return max(clocks, key=lambda clock: (clock.step, clock.shrinks, clock.ticks))
