"""Values that a script logs: the newest ones by name, and a file of them as TensorBoard reads it."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from psfleet.core.base.errors import ConfigError, UsageError, not_installed
from psfleet.core.base.settings.kinds import local_path

_MOST = 100  # names: each is a series in every monitoring system
_LONGEST = 100  # characters of a name
NEWEST: dict[str, float] = {}
"""The last value of each name that the script of this process has logged. Any thread may read it."""
LAGS: dict[str, float] = {}
"""By "TOPIC/PARTITION" how many messages of a topic this process is behind. Any thread may read it."""


class EventFile:
    """Appends to a new file in `folder`; what was added is in the file when `add` returns.

    A disk that is full ends the file, not the training.

    tensorboardX's SummaryWriter would hold values back for two minutes, in a thread that a crash takes along.

    Raises:
        ConfigError: tensorboardX is not installed, or the folder cannot be written to.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = local_path(folder)
        try:
            from tensorboardX.event_file_writer import EventsWriter
        except ImportError:
            raise not_installed(
                f"--tensorboard {folder} needs", "tensorboardX", "tensorboard"
            ) from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Its name begins with the second; a process that starts again in the same one has another id.
            self._file = EventsWriter(os.path.join(folder, "events"), f".{os.getpid()}")
        except OSError as error:
            raise ConfigError(
                f"--tensorboard is {str(folder)!r}, which cannot be written to ({error.strerror})"
            ) from None

    def add(self, values: Mapping[str, float], step: int, at: float | None = None) -> None:
        """Add scalars of one moment.

        Args:
            values: By tag.
            step: Their place on the axis of steps.
            at: Seconds since the epoch; None: now.
        """
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        summaries = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        when = time.time() if at is None else at
        with contextlib.suppress(OSError):
            self._file.write_event(
                Event(wall_time=when, step=step, summary=Summary(value=summaries))
            )
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


class LoggedValues:
    """Takes what the script of this process logs.

    Args:
        folder: Gives the folder for TensorBoard's event file; empty: there is none.
    """

    def __init__(self, folder: Callable[[], str]) -> None:
        self._folder_of = folder
        self._folder: str | None = None
        self._file: EventFile | None = None

    def log(self, name: str, value: Any, step: int) -> float:
        """The value as a number."""
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
        return number

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
