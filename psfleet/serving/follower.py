"""Followers: read-only copies of a running job's weights that stay up to date, for prediction.

This module does the work: a thread, calls to servers, retries and reconnection. The decisions, such as what
to ask for next and when to copy everything again, are in following.py, which does no I/O and so can be
tested without servers. The thread asks every 50 ms for changes; look-ups in other threads read the copy
under a lock and see one cut at a time. If the job stops answering, look-ups go on with the last values and
`age` rises.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.checkpoint import read_manifest
from psfleet.core.base.errors import ConfigError, PsfleetError, ServerUnavailable
from psfleet.core.base.job_files import environment_of
from psfleet.core.base.logs import log_of
from psfleet.core.base.object_store import is_whole, latest_snapshot
from psfleet.core.base.observability.exposition import LatencyHistogram, counter, latency
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import RowForm
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.interface import FollowedCut, load_runtime
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net.v1.follower_pb2 import ChangesReply, ChangesRequest, RowsReply, RowsRequest
from psfleet.serving.following import (
    AskChanges,
    AskRows,
    Following,
    FoundSnapshot,
    Rest,
    TakeCut,
    WeightCopy,
)
from psfleet.serving.row_source import SourceRuntime, rows_of_snapshot

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_log = log_of(__name__)

_INTERVAL = 0.05  # seconds between cuts
_RETRY = 0.2  # seconds before servers that do not answer are called again


class JobReader(Protocol):
    """Calls of a follower to a job's servers. psfleet_worker.reader_runtime.ReaderRuntime implements them."""

    @property
    def server_num(self) -> int: ...

    def read_changes(self, requests: Sequence[ChangesRequest | None]) -> Sequence[ChangesReply]:
        """Ask servers for their changes, all at once. A server whose request is None is not called."""

    def read_rows(self, server: int, request: RowsRequest) -> RowsReply:
        """Ask one server for a page of rows."""

    def close(self) -> None:
        """Close the connections. Safe to call twice."""


class Follower:
    """Copy of a running job's weights. Implements psfleet.serving.row_source.RowSource.

        with psfleet.serving.Follower("logs/my-job") as rows:
            rows.look_up("user", np.array([17, 42]))
            print(rows.cut, rows.age)

    The constructor returns once the first copy is complete; then a thread asks the servers for changes. In
    sync mode each cut is one round of all servers. In the other modes a cut has, for each server, all pushes
    that this server had acknowledged. If the job does not answer, the follower keeps its values, its age
    rises, and it continues when the servers answer again.

    Args:
        job: Folder of the job's logs, or the endpoints of its servers, as for psfleet.connect(job=...).
        rows: Form in which rows are kept.
        snapshot: Snapshot of the job, or a folder of its snapshots, to begin with, so that not all rows have
            to come from the servers. "" looks in the job's folder. A snapshot is used if the servers still
            know what has changed since: they do for the last two that were written.
        part: Part of the ids to hold, as (number from 0, number of parts). (0, 1) holds all ids.
        interval: Seconds between cuts.
        tls, insecure: As for psfleet.connect.

    Attributes:
        ages: Histogram of the ages of rows that look-ups have read.
        changed: Number of rows that changes have brought.
        failure: Error of the last request to the servers, or None if it was answered.

    Raises:
        ServerUnavailable: A server of the job does not answer.
        ConfigError: There is no such job, or a value is invalid.
    """

    def __init__(
        self,
        job: str | os.PathLike[str] | Sequence[str],
        rows: RowForm = "float32",
        part: tuple[int, int] = (0, 1),
        interval: float = _INTERVAL,
        *,
        snapshot: str = "",
        tls: str | None = None,
        insecure: bool | None = None,
    ) -> None:
        if not 0 <= part[0] < part[1]:
            raise ConfigError(f"a follower's part is {part!r}; name one of n parts, from (0, n) on")
        self.ages = LatencyHistogram()
        self.changed = 0
        self.failure: PsfleetError | None = None
        self._snapshot = snapshot
        self._job, self._access = job, {"tls": tls, "insecure": insecure}
        self._form, self._part = rows, part
        self._environment = self._find()
        self._reader: JobReader = load_runtime("reader", self._environment)
        self._following = Following(
            self._reader.server_num, self._new_copy, self._newest, interval, time.monotonic
        )
        self._rows = self._following.copy.rows
        # Held while a cut is applied, during a look-up, and by `held` for several look-ups of one thread. For
        # these it must be reentrant.
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._thread = ServiceThread(self._run, "follower")
        try:
            while self._following.cut is None:
                self._follow()
        except BaseException:
            self._reader.close()
            raise
        self._thread.start()

    def _find(self) -> Environment:
        return environment_of(self._job, **self._access)

    def _new_copy(self) -> WeightCopy:
        return WeightCopy(self._environment.job or "the job", self._form, self._part)

    # -- values --------------------------------------------------------------------------------

    def specs(self) -> Mapping[str, TableSpec]:
        return self._rows.specs()

    def look_up(self, table: str, ids: Ids) -> Floats:
        with self._lock:
            rows = self._rows.look_up(table, ids)
            age = int(self.age * 1e9)
        self.ages.counts[age.bit_length()] += len(ids)
        self.ages.total += age * len(ids)
        return rows

    def dense(self, table: str) -> Floats:
        return self._rows.dense(table)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Return a context in which all look-ups of this thread see the same cut."""
        with self._lock:
            yield

    @property
    def position(self) -> FollowedCut:
        """Cut that the values are of."""
        assert self._following.cut is not None
        return self._following.cut

    @property
    def cut(self) -> int:
        """Number of the cut."""
        return self.position.number

    @property
    def gaps(self) -> int:
        """Number of times that everything was copied again because servers no longer knew the changes."""
        return self._following.gaps

    @property
    def snapshot(self) -> str:
        """Path of the snapshot that the copy began with, or "" if all rows came from the servers."""
        return self._following.snapshot

    @property
    def bytes(self) -> int:
        """Bytes of memory that all values take."""
        return self._rows.bytes

    @property
    def age(self) -> float:
        """Seconds since the values were those of the training."""
        return self.position.age

    def measured(self, model: str) -> list["Metric"]:
        """Return the follower's metrics, labelled with the name of the model that it serves."""
        ages = "Ages of the rows of a running job that look-ups have read."
        gaps = "Copies that followers made anew because changes were not known any more."
        changes = "Rows that changes have brought to followers."
        return [
            latency("serving_row_age_seconds", ages, self.ages, model=model),
            counter("serving_gaps", gaps, {model: self.gaps}, "model"),
            counter("serving_changed_rows", changes, {model: self.changed}, "model"),
        ]

    def await_cut(self, number: int, timeout: float = 60.0) -> FollowedCut:
        """Wait until the cut's number is at least `number`, and return the cut.

        Args:
            number: Number of the cut: the round in sync mode, or else a count of pushes.
            timeout: Seconds to wait at most.

        Raises:
            ServerUnavailable: The cut has not come in time.
        """
        with self._lock:
            if not self._news.wait_for(lambda: self.cut >= number, timeout):
                raise ServerUnavailable(
                    f"the follower has come to cut {self.cut} in {timeout:g} seconds, and not to {number}"
                )
            return self.position

    # -- following -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._follow()
                if self.failure is not None and not self._closing.is_set():
                    _log.warning(f"the follower follows {self._shown_job} again")
                self.failure = None
            except PsfleetError as error:
                if self.failure is None and not self._closing.is_set():
                    self._warn_of(error)
                self.failure = error
                self._closing.wait(_RETRY)
                self._reconnect()

    @property
    def _shown_job(self) -> str:
        if isinstance(self._job, str | os.PathLike):
            return f"job {Path(self._job).name!r}"
        return "the job"

    def _warn_of(self, error: PsfleetError) -> None:
        """Log that the follower is cut off. A call's own text on a lost server is long, so it is for
        debug."""
        is_gone = isinstance(error, ServerUnavailable)
        why = "its servers do not answer" if is_gone else str(error)
        text = (
            f"the follower has lost {self._shown_job} ({why}); it serves what it has and tries on"
        )
        _log.warning(text)
        _log.debug(f"the call of the follower has failed: {error}")

    def _reconnect(self) -> None:
        """Connect to other endpoints if the job has been started again elsewhere."""
        with contextlib.suppress(PsfleetError):
            environment = self._find()
            if environment != self._environment:
                reader = load_runtime("reader", environment)
                self._reader.close()
                self._reader, self._environment = reader, environment
                self._following.begin_anew(reader.server_num)

    def _follow(self) -> None:
        """Carry out one step of `Following`: to the next cut, or closer to it.

        The generator yields actions. Each action's result is sent back to it, or its error thrown into it.
        """
        step = self._following.next_step()
        resume: Callable[[], Any] = step.__next__
        with contextlib.suppress(StopIteration):
            while True:
                action = resume()
                try:
                    resume = partial(step.send, self.perform(action))
                except PsfleetError as error:
                    resume = partial(step.throw, error)

    def perform(self, action: AskChanges | AskRows | TakeCut | Rest) -> Any:
        """Carry out an action of `Following`, and return the servers' replies if the action asks for any."""
        match action:
            case AskChanges(requests):
                return self._reader.read_changes(requests)
            case AskRows(server, request):
                began = time.monotonic()
                page = self._reader.read_rows(server, request)
                # A pause of twice the page's time leaves the servers to training: copying all rows of a large
                # table must not slow it down.
                if self._closing.wait(min(2 * (time.monotonic() - began), _INTERVAL)):
                    raise ServerUnavailable("the follower is closed")
                return page
            case TakeCut(replies, at):
                with self._lock:
                    self.changed += self._following.take(replies, at)
                    self._rows = self._following.copy.rows
                    self._news.notify_all()
            case Rest(seconds):
                self._closing.wait(seconds)
        return None

    def _newest(self) -> FoundSnapshot | None:
        job = self._job if isinstance(self._job, str | os.PathLike) else ""
        job_snapshots = Path(job, "snapshots") if job and Path(job).is_dir() else ""
        path = _newest(self._snapshot or str(job_snapshots))
        if not path:
            return None
        return FoundSnapshot(
            path,
            [file.sha256 for file in read_manifest(path).files],
            lambda: rows_of_snapshot(path, self._form, part=self._part),
        )

    def close(self) -> None:
        """End the thread and the connections; the values can still be read. Safe to call twice."""
        self._closing.set()
        self._reader.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
            self._reader.close()  # the thread may have connected again meanwhile

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _newest(location: str) -> str:
    """Return the newest snapshot in a folder or URL, the location itself if it is a snapshot, or "" if
    none."""
    if not location or is_whole(location):
        return location
    return latest_snapshot(location)


class FollowerRuntime(SourceRuntime):
    """Read-only runtime on a follower. Closing the runtime closes the follower.

    Args:
        follower: Source of the values.
    """

    def __init__(self, follower: Follower) -> None:
        super().__init__(follower, "the job that this client follows", "a worker of the job can")
        self._follower = follower

    @property
    @override
    def cut(self) -> FollowedCut:
        return self._follower.position

    @override
    def close(self) -> None:
        self._follower.close()
        super().close()
