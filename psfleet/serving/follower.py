"""Followers: copies of the weights of a running job that stay up to date."""

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
    """A follower's calls to the servers of a job; psfleet_worker.reader_runtime.ReaderRuntime has them."""

    @property
    def server_num(self) -> int: ...

    def read_changes(self, requests: Sequence[ChangesRequest | None]) -> Sequence[ChangesReply]:
        """Ask servers for what has changed, each server with its request."""

    def read_rows(self, server: int, request: RowsRequest) -> RowsReply:
        """Ask a server for a page of rows."""

    def close(self) -> None:
        """Close the connections. Safe to call twice."""


class Follower:
    """A copy of the weights of a running job. Implements psfleet.serving.row_source.RowSource.

    A thread asks the servers for changes. In sync mode each cut is one round of all servers; in the other
    modes it has, for each server, all pushes that this server had acknowledged. When the job does not answer,
    the follower keeps what it has, its age rises, and it goes on when servers answer again.

    Args:
        job: Folder of the job's logs, or the endpoints of its servers, as for psfleet.connect(job=...).
        rows: Form in which rows are kept.
        snapshot: A snapshot of the job, or a folder of its snapshots, for a copy without reading all rows
            from the servers; "": those in the job's folder. It is used if the servers still know what has
            changed since: of the last two that were written.
        part: Number of the part of the ids that it holds, and of all parts: (0, 1) is all.
        interval: Seconds between cuts.
        tls, insecure: As for psfleet.connect.

    Attributes:
        ages: Ages of the rows that look-ups have read.
        changed: Rows that changes have brought.
        failure: Error of the last request; None: it was answered.

    Raises:
        ServerUnavailable: A server of the job does not answer.
        ConfigError: No job is there, or a value is wrong.
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
        """Within, all look-ups of this thread are of one cut."""
        with self._lock:
            yield

    @property
    def position(self) -> FollowedCut:
        """The cut that it has."""
        assert self._following.cut is not None
        return self._following.cut

    @property
    def cut(self) -> int:
        """Number of the cut."""
        return self.position.number

    @property
    def gaps(self) -> int:
        """Copies that were made anew because changes were not known any more."""
        return self._following.gaps

    @property
    def snapshot(self) -> str:
        """The snapshot with which the copy began; "": all rows came from the servers."""
        return self._following.snapshot

    @property
    def bytes(self) -> int:
        """Memory of all values."""
        return self._rows.bytes

    @property
    def age(self) -> float:
        """Seconds since the cut was the newest."""
        return self.position.age

    def measured(self, model: str) -> list["Metric"]:
        """The metrics of what it serves to this model."""
        ages = "Ages of the rows of a running job that look-ups have read."
        gaps = "Copies that followers made anew because changes were not known any more."
        changes = "Rows that changes have brought to followers."
        return [
            latency("serving_row_age_seconds", ages, self.ages, model=model),
            counter("serving_gaps", gaps, {model: self.gaps}, "model"),
            counter("serving_changed_rows", changes, {model: self.changed}, "model"),
        ]

    def await_cut(self, number: int, timeout: float = 60.0) -> FollowedCut:
        """Return the cut, once its number is at least this one.

        Raises:
            ServerUnavailable: It has not come in time.
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
        """Say that the follower is cut off. What a call says of a lost server is long and adds nothing."""
        is_gone = isinstance(error, ServerUnavailable)
        why = "its servers do not answer" if is_gone else str(error)
        text = (
            f"the follower has lost {self._shown_job} ({why}); it serves what it has and tries on"
        )
        _log.warning(text)
        _log.debug(f"the call of the follower has failed: {error}")

    def _reconnect(self) -> None:
        """The job may have been started again, elsewhere."""
        with contextlib.suppress(PsfleetError):
            environment = self._find()
            if environment != self._environment:
                reader = load_runtime("reader", environment)
                self._reader.close()
                self._reader, self._environment = reader, environment
                self._following.begin_anew(reader.server_num)

    def _follow(self) -> None:
        """Get to the next cut, or a step nearer."""
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
        """Do what the way to the next cut needs; what has come of it."""
        match action:
            case AskChanges(requests):
                return self._reader.read_changes(requests)
            case AskRows(server, request):
                began = time.monotonic()
                page = self._reader.read_rows(server, request)
                # The servers are left to training for a while after a page.
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
    """The newest snapshot of a folder or URL, or the place itself if it is one; "": there is none."""
    if not location or is_whole(location):
        return location
    return latest_snapshot(location)


class FollowerRuntime(SourceRuntime):
    """Read-only runtime on a follower, which it ends with itself.

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
