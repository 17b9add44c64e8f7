"""Followers: read-only copies of a running job's weights that stay up to date, for prediction.

A follower takes the job's weights at one *cut* after another. A cut is the state of all weights at one
point of the training. This module has the thread, the calls to servers, the retries and the reconnection.
The decisions, such as the next request and a new copy of everything, are in follower_state_machine.py,
which does no I/O and so can be tested without servers.

Every 50 ms the thread requests the changes since the last cut. Lookups in other threads read the copy under
a lock, so that each lookup sees a single cut. If the job does not reply, lookups use the last values and
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
from psfleet.core.base.errors import ConfigError, PsfleetError, ServerUnavailable, UsageError
from psfleet.core.base.job_files import environment_of
from psfleet.core.base.logs import log_of
from psfleet.core.base.object_store import is_whole, latest_snapshot
from psfleet.core.base.observability.exposition import LatencyHistogram, counter, latency
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import RowForm
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.kernels.id_routing import owned_by
from psfleet.core.engine.runtime_interface import FollowedCut, load_runtime
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net.v1.follower_pb2 import ChangesReply, ChangesRequest, RowsReply, RowsRequest
from psfleet.serving.follower_state_machine import (
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
_RETRY = 0.2  # seconds before servers that do not reply are called again


class JobReader(Protocol):
    """Calls from a follower to the servers of a job. psfleet_worker.reader_runtime.ReaderRuntime implements
    them.
    """

    @property
    def server_num(self) -> int: ...

    def read_changes(self, requests: Sequence[ChangesRequest | None]) -> Sequence[ChangesReply]:
        """Request the changes of all servers at the same time. A server whose request is None is
        not called.
        """

    def read_rows(self, server: int, request: RowsRequest) -> RowsReply:
        """Request some rows from one server, as many as one reply carries."""

    def close(self) -> None:
        """Close the connections. A second call has no effect."""


class Follower:
    """Read-only copy of a running job's weights, which a thread keeps up to date.

        with psfleet.serving.Follower("logs/my-job") as rows:
            rows.look_up("user", np.array([17, 42]))
            print(rows.cut, rows.age)

    The constructor returns once the first copy is complete. From then on the weights move from one *cut* to
    the next. A cut is the state of the job at one point of its training:

    - In sync mode, it is the state of all servers after the same round.
    - In the other modes, it has from each server all pushes that the server had acknowledged.

    If the job does not reply, the follower keeps its values while `age` rises. It continues when the
    servers reply again.

    Implements psfleet.serving.row_source.RowSource.

    Args:
        job: Folder of the job's logs, or the endpoints of its servers, as in psfleet.connect(job=...).
        rows: Number format in which rows are kept, such as "float32" or "int8".
        snapshot: Snapshot of the job, or a folder of its snapshots, that the first copy is read from, in
            order to load the servers less. "" searches the job's folder. The servers must still know the
            changes since the snapshot, which they do for the two that they wrote last. Otherwise all rows
            come from the servers.
        part: Share of the ids to keep, as (number from 0, number of parts), if several followers divide
            them. (0, 1) keeps all ids.
        interval: Seconds between cuts.
        tls, insecure: As in psfleet.connect.

    Attributes:
        ages: Histogram of the age of the rows that lookups have read.
        changed: Number of rows that were updated since the first copy.
        failure: Error of the last request to the servers, or None if they replied.

    Raises:
        ServerUnavailable: A server of the job does not reply.
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
        # Held while a cut is applied and during a lookup. `held` keeps it for several lookups of one
        # thread, so the lock must be reentrant.
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

    def specs(self) -> Mapping[str, TableSpec]:
        return self._rows.specs()

    def look_up(self, table: str, ids: Ids) -> Floats:
        number, parts = self._part
        # A row of another part would be silently replaced by its initial value.
        if parts > 1 and not (is_kept := owned_by(ids, number, parts)).all():
            raise UsageError(
                f"this follower keeps part {number + 1}/{parts} of the ids, and id {ids[~is_kept][0]} of "
                f"table {table!r} is in another one; look rows up with psfleet.serving.SplitClient"
            )
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
        """Return a context manager under which all lookups of this thread see the same cut."""
        with self._lock:
            yield

    @property
    def position(self) -> FollowedCut:
        """Cut (point of the training) that the present values are from."""
        assert self._following.cut is not None
        return self._following.cut

    @property
    def cut(self) -> int:
        """Number of the cut (point of the training) that the present values are from.

        It is the number of the round in sync mode, and a count of pushes in the other modes.
        """
        return self.position.number

    @property
    def gaps(self) -> int:
        """Number of times that all rows were copied again because the servers no longer knew the changes."""
        return self._following.gaps

    @property
    def snapshot(self) -> str:
        """Path of the snapshot that the first copy was read from, or "" if all rows came from the
        servers.
        """
        return self._following.snapshot

    @property
    def bytes(self) -> int:
        """Memory that all values take, in bytes."""
        return self._rows.bytes

    @property
    def age(self) -> float:
        """Seconds since the training had the present values."""
        return self.position.age

    def measured(self, model: str) -> list["Metric"]:
        """Return the follower's metrics, labelled with the name of the model that it serves."""
        ages = "Ages of the rows of a running job that look-ups have read."
        gaps = "Copies that followers made again because changes were not known any more."
        changes = "Rows that changes have brought to followers."
        return [
            latency("serving_row_age_seconds", ages, self.ages, model=model),
            counter("serving_gaps", gaps, {model: self.gaps}, "model"),
            counter("serving_changed_rows", changes, {model: self.changed}, "model"),
        ]

    def await_cut(self, number: int, timeout: float = 60.0) -> FollowedCut:
        """Wait until the values are from cut `number` of the training or a later one, and return the cut.

        Args:
            number: Number of the cut: the round in sync mode, and a count of pushes in the other modes.
            timeout: Maximum number of seconds to wait.

        Raises:
            ServerUnavailable: The cut has not come within `timeout`.
        """
        with self._lock:
            if not self._news.wait_for(lambda: self.cut >= number, timeout):
                raise ServerUnavailable(
                    f"the follower has come to cut {self.cut} in {timeout:g} seconds, and not to {number}"
                )
            return self.position

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
        """Log that the job does not reply. The call's own message is long, so it is logged for debugging
        only.
        """
        is_gone = isinstance(error, ServerUnavailable)
        why = "its servers do not answer" if is_gone else str(error)
        text = (
            f"the follower has lost {self._shown_job} ({why}); it serves what it has and tries on"
        )
        _log.warning(text)
        _log.debug(f"the call of the follower has failed: {error}")

    def _reconnect(self) -> None:
        """Connect again if the job has been restarted at other endpoints."""
        with contextlib.suppress(PsfleetError):
            environment = self._find()
            if environment != self._environment:
                reader = load_runtime("reader", environment)
                self._reader.close()
                self._reader, self._environment = reader, environment
                self._following.begin_anew(reader.server_num)

    def _follow(self) -> None:
        """Carry out the actions of one `Following.next_step`, which lead to the next cut or closer to it.

        The step is a generator of actions. The result of each action is sent back to the generator, or its
        error is thrown into it.
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
        """Carry out one action, and return the servers' replies to a request."""
        match action:
            case AskChanges(requests):
                return self._reader.read_changes(requests)
            case AskRows(server, request):
                began = time.monotonic()
                page = self._reader.read_rows(server, request)
                # Wait twice as long as this page of rows took, so that copying a large table leaves two
                # thirds of the servers' time to training.
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
        """Stop following: end the thread and close the connections. The values can still be read. Safe to
        call twice.
        """
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
    """Return the newest snapshot in a folder or at a URL, or `location` if it is a snapshot, or "" if there
    is none.
    """
    if not location or is_whole(location):
        return location
    return latest_snapshot(location)


class FollowerRuntime(SourceRuntime):
    """Read-only runtime whose tables have a follower's values. Closing the runtime closes the follower."""

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
