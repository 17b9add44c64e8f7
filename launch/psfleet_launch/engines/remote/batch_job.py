"""A batch job of any queue: submitted, and followed to its end."""

import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.files import open_own_folder
from psfleet.core.base.settings.declaration import setting
from psfleet.core.base.settings.kinds import SECONDS
from psfleet.core.base.threads import handled
from psfleet_launch.job.job_folder import is_claimed
from psfleet_launch.job.job_request import Launch
from psfleet_launch.job.resources import Resources

_LOOK = 0.2  # seconds between looks at the output
_FIRST, _LAST = 0.5, 10.0  # seconds between questions to the queue: first few, then many
_QUEUE_TIMEOUT = 60.0  # seconds without an answer of the queue


@dataclass(frozen=True)
class BatchSettings:
    """Settings of any batch queue; those of an engine derive from these."""

    nodes: int = setting(
        1, "Batch queues: how many nodes to ask for", names="--nodes engine.batch.nodes", least=1
    )
    stop_before: float = setting(
        120.0,
        "Batch queues: how long before the time limit to take a snapshot and end",
        SECONDS,
        names="--stop-before engine.batch.stop_before",
        metavar="2min",
        least=1,
        most=65535,
    )


@dataclass(frozen=True)
class BatchState:
    """State of a job in its queue.

    Attributes:
        exit_code: None: it is not over.
        ended_by: Cause of an end from outside, in the queue's words; empty: none.
    """

    exit_code: int | None = None
    ended_by: str = ""


class BatchQueue(ABC):
    """A batch queue that takes jobs.

    Attributes:
        label: Word for a job at the beginning of messages.
        prefix: Prefix of the names of files that belong to the queue.
    """

    label: ClassVar[str]
    prefix: ClassVar[str]
    suffix: ClassVar[str]

    @abstractmethod
    def script(
        self,
        name: str,
        settings: BatchSettings,
        words: Sequence[str],
        needs: Resources,
        output: tuple[Path, Path],
    ) -> str:
        """The batch script: it becomes the launcher (`launcher_command`) on the job's first node.

        The queue announces the time limit: by SIGUSR1, `settings.stop_before` ahead.

        Args:
            needs: Resources that each node must have; none that the queue is to decide.
            output: The files of its standard output and standard error.
        """

    @abstractmethod
    def submit(self, script: Path) -> str:
        """Hand a job to the queue; its number there.

        Raises:
            ConfigError: It is refused; the text is the queue's.
        """

    @abstractmethod
    def state(self, job: str) -> BatchState:
        """Return the known state of a submitted job.

        Raises:
            ConfigError: The queue does not answer; the text is its own.
        """

    @abstractmethod
    def cancel(self, job: str, by: signal.Signals | None) -> None:
        """End a job: by this signal to its launcher, or at once if it waits; None: at once in any case."""


class BatchJob:
    """A job that was submitted.

    Attributes:
        output: The files of its standard output and standard error.
    """

    def __init__(self, queue: BatchQueue, folder: Path) -> None:
        self.id = ""
        self.output = folder / f"{queue.prefix}.out", folder / f"{queue.prefix}.err"
        self._queue = queue
        self._script = folder / f"job.{queue.suffix}"

    @classmethod
    def submit(
        cls, queue: BatchQueue, name: str, launch: Launch, words: Sequence[str], needs: Resources
    ) -> "BatchJob":
        """Hand a job to the queue. Arguments as for BatchQueue.script.

        Raises:
            ConfigError: The queue refuses it, or a job of this name runs.
        """
        folder = (launch.log_dir / name).absolute()
        try:
            os.close(open_own_folder(folder))
        except OSError as error:
            raise ConfigError(
                f"log folder {str(folder)!r} cannot be used ({error.strerror}); choose another with --log-dir"
            ) from None
        if is_claimed(folder):
            raise ConfigError(f"job {name!r} is running; choose another --job, or wait for its end")
        job = cls(queue, folder)
        job._script.write_text(
            queue.script(name, launch.of(BatchSettings), words, needs, job.output)
        )
        for old in job.output:
            old.unlink(missing_ok=True)
        job.id = queue.submit(job._script)
        return job

    def follow(self) -> int:
        """Show what the job writes until it is over; its exit code. Ctrl-C and SIGTERM are passed on."""
        streams = (sys.stdout.buffer, sys.stderr.buffer)
        shown = [0, 0]
        with self._passes_signals_on():
            print(
                f"{self._queue.label} {self.id}, from {self._script}", file=sys.stderr, flush=True
            )
            for state in self._states():  # noqa: B007  # the last one counts
                for number, (path, stream) in enumerate(zip(self.output, streams, strict=True)):
                    shown[number] += _show(path, shown[number], stream)
        if state.ended_by:
            print(f"{self._queue.label} {self.id} has ended: {state.ended_by}", file=sys.stderr)
        assert state.exit_code is not None
        return state.exit_code

    def _states(self) -> Iterator[BatchState]:
        """Yield the job's state again and again; the last one is its end."""
        state = BatchState()
        pause, request_at = _FIRST, time.monotonic()
        reply_at = request_at
        while state.exit_code is None:
            yield state
            time.sleep(_LOOK)
            if time.monotonic() - request_at < pause:
                continue
            pause, request_at = min(pause * 1.2, _LAST), time.monotonic()
            try:
                state = self._queue.state(self.id)
                reply_at = time.monotonic()
            except ConfigError as error:
                if time.monotonic() - reply_at > _QUEUE_TIMEOUT:
                    raise ConfigError(
                        f"{self._queue.label} {self.id} can be followed no more: {error}"
                    ) from None
        yield state

    def _passes_signals_on(self) -> AbstractContextManager[None]:
        """Within, SIGINT and SIGTERM end the job: the first in order, the next at once."""
        numbers: list[int] = []

        def end(number: int, frame: object) -> None:
            numbers.append(number)
            self._queue.cancel(self.id, signal.Signals(number) if len(numbers) == 1 else None)

        return handled((signal.SIGINT, signal.SIGTERM), end)


def launcher_command(name: str, words: Sequence[str]) -> list[str]:
    """Return the command of a batch script."""
    return [sys.executable, "-m", "psfleet_launch", "--job", name, *words]


def _show(path: Path, start: int, stream: BinaryIO) -> int:
    """Write on what a file has from some byte on; how many bytes these were."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return 0
    stream.write(data)
    stream.flush()
    return len(data)
