"""Values that a script logs: the newest of each name for whoever watches, all of them for TensorBoard."""

from collections.abc import Callable
from typing import Any

from psfleet.errors import UsageError
from psfleet.observability.event_file import EventFile

__all__ = ["NEWEST", "LoggedValues"]

_MOST = 100  # names: each is a series in every monitoring system
_LONGEST = 100  # characters of a name

NEWEST: dict[str, float] = {}
"""The last value of each name that the script of this process has logged. Any thread may read it."""


class LoggedValues:
    """Takes what the script of this process logs.

    Args:
        folder: Gives the folder for TensorBoard's event file; empty: there is none.
    """

    def __init__(self, folder: Callable[[], str]) -> None:
        self._folder_of = folder
        self._folder: str | None = None
        self._file: EventFile | None = None

    def log(self, name: str, value: Any, step: int) -> None:
        """See Fleet.log."""
        number = _checked(name, value)
        if not isinstance(step, int) or not 0 <= step < 2**63:
            raise UsageError(
                f"fleet.log got the step {step!r:.60} for {name!r}; it must be a whole number from 0 on"
            )
        if name not in NEWEST and len(NEWEST) == _MOST:
            raise UsageError(
                f"fleet.log got the name {name!r} after {_MOST} others; log at most {_MOST} names"
            )
        if self._folder is None:
            self._folder = self._folder_of()
        if self._folder and self._file is None:
            self._file = EventFile(self._folder)
        NEWEST[name] = number
        if self._file is not None:
            self._file.add({name: number}, step)

    def close(self) -> None:
        """Close the file. The next value begins another one."""
        self._folder = None
        if self._file is not None:
            self._file.close()
            self._file = None


def _checked(name: str, value: Any) -> float:
    is_line = isinstance(name, str) and name.strip() and name.isprintable()
    if not is_line or len(name) > _LONGEST:
        raise UsageError(
            f"fleet.log got the name {name!r:.60}; it must be a line of at most {_LONGEST} characters"
        )
    try:
        one = value.item() if hasattr(value, "item") else value  # of an array or tensor
        return float(one)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UsageError(
            f"fleet.log got {value!r:.60} for {name!r}; it must be one number"
        ) from None
