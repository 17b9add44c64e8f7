"""Values that a script logs with `fleet.log`. They become metrics, and may be written for TensorBoard.

The newest value of each name is in a module-level dictionary, because heartbeats and metrics read it from
other threads.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from psfleet.core.base.errors import ConfigError, UsageError, optional_module
from psfleet.core.base.settings.kinds import local_path

_MOST = 100  # largest number of names: each is a series in every monitoring system
_LONGEST = 100  # characters of the longest name
NEWEST: dict[str, float] = {}
"""Newest value of each name that this process's script has logged. Any thread may read it."""
LAGS: dict[str, float] = {}
"""Number of messages of a topic that this process has not read yet, by "TOPIC/PARTITION".

Any thread may read it.
"""


class EventFile:
    """TensorBoard event file. `add` writes its values to the file before it returns.

    If the disk is full, values are lost and training continues. tensorboardX's SummaryWriter is not used: it
    would keep values for two minutes in a thread, and lose them in a crash.

    Raises:
        ConfigError: tensorboardX is not installed, or the folder cannot be written to.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = local_path(folder)
        use = f"--tensorboard {folder} needs"
        module = "tensorboardX.event_file_writer"
        writer = optional_module(module, use, "tensorboardX", "tensorboard").EventsWriter
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The file's name begins with the present second. A process that is restarted within a second
            # has a new id.
            self._file = writer(os.path.join(folder, "events"), f".{os.getpid()}")
        except OSError as error:
            raise ConfigError(
                f"--tensorboard is {str(folder)!r}, which cannot be written to ({error.strerror})"
            ) from None

    def add(self, values: Mapping[str, float], step: int, at: float | None = None) -> None:
        """Add values of one moment.

        Args:
            at: Time in seconds since the epoch, or None for now.
        """
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        summaries = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        wall_time = time.time() if at is None else at
        with contextlib.suppress(OSError):
            self._file.write_event(
                Event(wall_time=wall_time, step=step, summary=Summary(value=summaries))
            )
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


class LoggedValues:
    """Accepts the values that this process's script logs.

    Args:
        folder: Returns the folder for TensorBoard's event file, or "" to write none.
    """

    def __init__(self, folder: Callable[[], str]) -> None:
        self._folder_of = folder
        self._folder: str | None = None
        self._file: EventFile | None = None

    def log(self, name: str, value: Any, step: int) -> float:
        """Record a value under a name, and return the value as a float.

        Raises:
            UsageError: Name, value or step is invalid, or there are too many names.
        """
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
        """Close the event file. The next value opens a new one."""
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
        content = value.item() if hasattr(value, "item") else value  # of an array or tensor
        return float(content)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UsageError(
            f"fleet.log got {value!r:.60} for {name!r}; it must be one number"
        ) from None
