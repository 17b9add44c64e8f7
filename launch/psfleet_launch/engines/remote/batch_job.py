"""Batch jobs: submits the launcher to a batch queue, shows the output of the batch job, and waits for its
end.

An engine for a batch queue implements BatchQueue, as engines/slurm.py does. This code runs on the machine
where the user types `psfleet-launch`. The launcher of the job runs inside the batch job.
"""

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
_FIRST, _LAST = 0.5, 10.0  # seconds between two questions to the queue, at first and after a while
_QUEUE_TIMEOUT = 60.0  # seconds without an answer of the queue until the job is no longer followed


@dataclass(frozen=True)
class BatchSettings:
    """Settings that every batch queue (a scheduler such as Slurm) has.

    An engine for a queue derives its own settings class from this class.
    """

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
        exit_code: Exit code of the job, or None if the job is not over.
        ended_by: Reason in the queue's words if the queue or a user has ended the job, or "".
    """

    exit_code: int | None = None
    ended_by: str = ""


class BatchQueue(ABC):
    """Interface of a batch queue.

    Attributes:
        label: Name of this queue's jobs at the beginning of messages, such as "Slurm job".
        prefix: Name of the output files, without ".out" and ".err".
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
        """Return a batch script that executes `launcher_command` on the job's first node.

        The script must tell the queue to send SIGUSR1 to the launcher `settings.stop_before` seconds before
        the time limit. The launcher then takes a snapshot and ends.

        Args:
            needs: Resources that each node must have. 0 means that the queue may choose.
            output: Files for standard output and standard error.
        """

    @abstractmethod
    def submit(self, script: Path) -> str:
        """Submit a batch script, and return the job's number in the queue.

        Raises:
            ConfigError: The queue refuses the job. The message is the queue's.
        """

    @abstractmethod
    def state(self, job: str) -> BatchState:
        """Return the known state of a submitted job.

        Raises:
            ConfigError: The queue does not answer. The message is the queue's.
        """

    @abstractmethod
    def cancel(self, job: str, by: signal.Signals | None) -> None:
        """End a job.

        Args:
            by: Signal to send to the launcher of a running job, or None to end the job at once. A job that
                has not started yet is removed from the queue in either case.
        """


class BatchJob:
    """Batch job that was submitted to a queue.

    Attributes:
        output: Files of the job's standard output and standard error.
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
        """Write the batch script and submit it. The arguments are those of `BatchQueue.script`.

        Raises:
            ConfigError: The queue refuses the job, or a job with this name is running.
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
        """Show the job's output until the job is over, and return its exit code. Ctrl-C and SIGTERM end the
        job."""
        streams = (sys.stdout.buffer, sys.stderr.buffer)
        shown = [0, 0]
        with self._passes_signals_on():
            print(
                f"{self._queue.label} {self.id}, from {self._script}", file=sys.stderr, flush=True
            )
            for state in self._states():  # noqa: B007  # the last state is used below
                for number, (path, stream) in enumerate(zip(self.output, streams, strict=True)):
                    shown[number] += _show(path, shown[number], stream)
        if state.ended_by:
            print(f"{self._queue.label} {self.id} has ended: {state.ended_by}", file=sys.stderr)
        assert state.exit_code is not None
        return state.exit_code

    def _states(self) -> Iterator[BatchState]:
        """Yield the last known state of the job every 0.2 s, until its end.

        The queue is queried less often, because each query is work for a server that all users share.
        """
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
        """Return a context in which a SIGINT or SIGTERM ends the job regularly, and a second one at once."""
        numbers: list[int] = []

        def end(number: int, frame: object) -> None:
            numbers.append(number)
            self._queue.cancel(self.id, signal.Signals(number) if len(numbers) == 1 else None)

        return handled((signal.SIGINT, signal.SIGTERM), end)


def launcher_command(name: str, words: Sequence[str]) -> list[str]:
    """Return the command that a batch script runs: `psfleet-launch` with the user's arguments."""
    return [sys.executable, "-m", "psfleet_launch", "--job", name, *words]


def _show(path: Path, start: int, stream: BinaryIO) -> int:
    """Write the bytes of a file from position `start` on to a stream, and return the number of bytes."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return 0
    stream.write(data)
    stream.flush()
    return len(data)
