"""A file of scalars as TensorBoard reads them, by tensorboardX."""

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from psfleet.errors import ConfigError

__all__ = ["EventFile"]


class EventFile:
    """Appends to a new file in `folder`; what was added is in the file when `add` returns.

    A disk that is full ends the file, not the training.

    tensorboardX's SummaryWriter would hold values back for two minutes, in a thread that a crash takes along.

    Raises:
        ConfigError: tensorboardX is not installed, or the folder cannot be written to.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
        except ImportError:
            raise ConfigError(
                f"--tensorboard is {str(folder)!r}, which needs tensorboardX; "
                "pip install 'psfleet[tensorboard]'"
            ) from None
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
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

        told = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        when = time.time() if at is None else at
        with contextlib.suppress(OSError):
            self._file.write_event(Event(wall_time=when, step=step, summary=Summary(value=told)))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()
