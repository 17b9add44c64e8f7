"""ClusterRuntime: a worker's connection to its parameter servers, and the runtime of its script.

Each worker process creates one. The training thread calls it. Other threads send heartbeats, take part in
snapshots, and send pushes that could not be merged with a pull. If a server does not reply, the call is
repeated for as long as the environment says. Then the call raises ServerUnavailable or DeadlineExceeded.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base import crash_points
from psfleet.core.base.crash_points import Send
from psfleet.core.base.errors import ConfigError
from psfleet.core.base.observability.trace_setup import open_tracing
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.base.threads import deferred
from psfleet.core.engine.consistency import ConsistencyMode, find_mode
from psfleet.core.engine.gradient_checks import check_reduction
from psfleet.core.engine.non_finite_check import NonFiniteCheck
from psfleet.core.engine.round_plan import Range, SourceParts
from psfleet.core.engine.rules import import_rules
from psfleet.core.engine.runtime_interface import (
    CompletedPush,
    Gradient,
    PendingPush,
    PushCounter,
    Runtime,
    TableState,
    with_counts,
)
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.membership_view import Position
from psfleet.core.engine.worker_state import ScriptProgress
from psfleet.core.net.v1 import coordinator_pb2, shard_pb2
from psfleet.core.runtime.runtime_bases import handed_on, read_through
from psfleet.core.runtime.script_runtime import Cluster, ClusterLike, ScriptRuntime
from psfleet.core.runtime.stages import StagePosition
from psfleet.core.runtime.strategy import ConsistencySettings, WireSettings
from psfleet_worker.connection.call import wait_all
from psfleet_worker.connection.connection import FleetConnection
from psfleet_worker.connection.server_client import figures_of
from psfleet_worker.data_client import DataClient
from psfleet_worker.session.data_shares import WorkerData
from psfleet_worker.session.instructions import CollectiveResult
from psfleet_worker.session.retry_policy import Patience
from psfleet_worker.session.worker_session import Collectives
from psfleet_worker.snapshot_marks import SnapshotMarks, StateAt
from psfleet_worker.tensors.transfers import Transfers
from psfleet_worker.tensors.whole_tables import WorkerTables
from psfleet_worker.worker_metrics import StepTimes

if TYPE_CHECKING:
    from psfleet_worker.stage_links import StageLinks

Floats = NDArray[np.float32]


class ClusterRuntime(ClusterLike):
    """Runtime on the servers of a cluster: a worker's connection to its parameter servers.

    Steps are a stream of pushes and pulls (`session`, `stream`). Collectives, snapshots and calls for whole
    tables first wait until all earlier pushes are applied.

    Args:
        environment: Index of this worker, and endpoints of the servers.
        mode: Consistency mode, the same for all workers. A name means the mode with its default settings.
        wire: Compression on the wire, or None for the default.
        patience: Time limits of calls, or None for those of the environment.
        inject_faults: Wraps the function that sends the calls to one server, for tests, such as
            `psfleet_launch.chaos.message_faults.MessageFaults`.

    Attributes:
        wire: Compression on the wire, as given or the default.
        counters: Counters of the script. This worker's pushes carry their counts.
    """

    pools = True

    worker_index: int = read_through("_fleet.worker")
    worker_num: int = read_through("_fleet.workers")
    reads_ahead: bool = read_through("_fleet.stream.reads_ahead")
    times: StepTimes = read_through("_fleet.times")
    mode: ConsistencyMode = read_through("_session.declared")
    progress: ScriptProgress = read_through("_session.progress")
    pushes: int = read_through("_session.progress.pushes")
    step: int = read_through("_session.sequence")
    passes: bool = read_through("_session.passes")
    watch: NonFiniteCheck = read_through("_transfers.watch")
    in_round: bool = read_through("_worker_data.in_round")
    next_ranges: tuple[Range, ...] = read_through("_worker_data.next_ranges")
    # A part implements these calls completely. `handed_on` calls it without another Python call in between.
    pass_collectives = handed_on(ClusterLike.pass_collectives, "_session")
    create = handed_on(Runtime.create, "_tables")
    open = handed_on(Runtime.open, "_tables")
    evictions = handed_on(Runtime.evictions, "_tables")
    pull = handed_on(Runtime.pull, "_transfers")
    pull_ahead = handed_on(Runtime.pull_ahead, "_transfers")
    flush = handed_on(Runtime.flush, "_transfers")

    def __init__(
        self,
        environment: Environment,
        mode: ConsistencyMode | Mode,
        wire: WireSettings | None = None,
        *,
        patience: Patience | None = None,
        inject_faults: Callable[[int, Send], Send] | None = None,
    ) -> None:
        if environment.role != "worker":
            raise ConfigError(
                f"the role is {environment.role!r}; a cluster's runtime is for "
                "workers (PSFLEET_ROLE=worker)"
            )
        import_rules(environment.rules, environment.rules_folder)
        chaos = crash_points.chaos()
        injector = None if chaos is None else chaos.FaultInjector(environment.rank)
        self._audit = None if injector is None else injector.audit
        self._tracing = open_tracing(environment)
        present = find_mode(mode) if isinstance(mode, str) else mode
        self._fleet = FleetConnection(
            environment, present, patience or Patience.of(environment), inject_faults or injector
        )
        self.wire = wire or WireSettings()
        self.counters: list[PushCounter] = []
        self._session = self._fleet.session
        self._marks = SnapshotMarks(self._fleet)
        self._fleet.heartbeats.listeners.append(self._marks.listen)
        self._tables = WorkerTables(self._fleet)
        self._transfers = self._make_transfers()
        self._mode_request: tuple[str, dict[str, int]] | None = None
        self._closed = False
        self._links: StageLinks | None = None
        self._worker_data = WorkerData(self._session)
        self._collectives = Collectives(
            self._session, self._fleet.stream, lambda: self._worker_data.reached
        )
        try:
            self._fleet.start()
            # Server 0 cannot know the ports that the other servers have chosen, so tell it.
            self._marks.introduce(keeps=False)
        except BaseException:
            self._fleet.close()
            self._end_traces()
            raise
        if injector is not None:
            injector.audit.begin_incarnation(self._session.incarnation, self.server_num)
            self._fleet.on_move.append(lambda: injector.audit.move_to(self.server_num))
        self._marks.start()
        self._transfers.begin()

    def _make_transfers(self) -> Transfers:
        if self._tracing is None:
            return Transfers(self._fleet, self._tables.spec, self.wire)
        from psfleet_worker.tensors.push_trace import PushTrace

        begin_trace = functools.partial(PushTrace, self._tracing)
        return Transfers(self._fleet, self._tables.spec, self.wire, begin_trace)

    @property
    @override
    def cluster(self) -> Cluster:
        return self

    @property
    @override
    def server_num(self) -> int:
        return len(self._fleet.clients)

    @property
    @override
    def collectives(self) -> tuple[int, int]:
        return self._session.collectives, self._session.changes

    @property
    @override
    def position(self) -> Position:
        return self._worker_data.position or (0, 0)

    @override
    def push(
        self,
        gradients: Sequence[Gradient],
        *,
        samples: int = 0,
        loss: float | None = None,
        position: Position | None = None,
    ) -> PendingPush:
        """Push the gradients of one step, unless an earlier process of this worker has made this push.

        Args:
            gradients, samples, loss: The same as for `Runtime.push`.
            position: Position of the script in its data after the step, or None for the present position.
        """
        if self.counters:
            gradients = with_counts(gradients, self.counters)
        position = position or self._worker_data.position or (0, 0)
        ticket: PendingPush = CompletedPush()
        if not self._session.progress.passes():
            if self._audit is not None:
                gradients = [*gradients, self._audited(self._audit)]
            ticket = self._transfers.push(gradients, samples, loss, position)
        for counter in self.counters:  # also for a push that was passed over: its counts were in it
            counter.arrived()
        return ticket

    def _audited(self, audit: Any) -> Gradient:
        """Return the gradient that counts this push on every server, in a job with faults made on purpose."""
        if audit.spec.key not in self._tables.specs:
            self.create(audit.spec)
        gradient: Gradient = audit.gradient(self._session.declared.adds_deltas)
        return gradient

    @override
    @deferred()
    def barrier(self, timeout: float | None = None) -> None:
        """Wait for all workers.

        In sync mode the rounds of other workers continue without this one meanwhile.
        """
        with self._marks.blocking():
            result: CollectiveResult = self._transfers.run(
                self._collectives.gather(), timeout=timeout
            )
        self._mode_request = result.mode_request

    @override
    def take_mode_request(self) -> tuple[str, dict[str, int]] | None:
        # All workers get a request at the same barrier, so every worker then calls `set_mode`.
        mode_request, self._mode_request = self._mode_request, None
        return mode_request

    @override
    @deferred()
    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        check_reduction(mode)
        program = self._collectives.gather(mode, np.ascontiguousarray(value))
        with self._marks.blocking():
            result: NDArray[Any] = self._transfers.run(program).value
        return result.reshape(np.shape(value))

    @override
    @deferred()
    def set_mode(self, consistency: ConsistencySettings) -> None:
        """Switch to another consistency mode.

        Does nothing if an earlier process of this worker has already made this switch.
        """
        mode = consistency.declared
        conflict = mode.conflicts.get("wire")
        if conflict and self.wire != WireSettings():
            raise ConfigError(
                f"{self.wire} and the consistency mode {mode.name!r} contradict each other: {conflict}"
            )
        with self._marks.blocking():
            self._transfers.run(self._collectives.set_mode(mode))
        self._transfers.forget()
        self._transfers.begin()

    @override
    def read_table(self, table: int) -> TableState:
        self.flush()
        return self._tables.read(table)

    @override
    def write_table(self, table: int, state: TableState) -> None:
        self.flush()
        self._transfers.forget()
        self._tables.write(table, state)

    @override
    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> int:
        self.flush()
        return self._tables.shrink(table, threshold, unseen)

    @override
    def load(self, path: str) -> None:
        self.flush()
        self._transfers.forget()
        self._tables.load(path)

    @override
    def specs(self) -> dict[int, TableSpec]:
        return dict(self._tables.specs)

    @override
    def save(self, path: str, *, delta: bool = False, base: bool = False) -> str:
        """Save a snapshot and return its path. The servers must see the same file system as this worker."""
        self.flush()
        return self._marks.take(path, delta=delta, base=base)

    @override
    def keep(self, state_at: StateAt) -> bytes:
        self._marks.state_at = state_at
        return self._marks.introduce(keeps=True)

    @property
    @override
    def newest_snapshot(self) -> tuple[str, int] | None:
        if self._marks.newest is None:
            return None
        folder, last = self._marks.newest
        return folder, self.pushes - (self._session.sequence - last) if last else 0

    @override
    def data_steps(
        self,
        trainer: ScriptRuntime,
        size: int,
        batch: int,
        epochs: int,
        seed: int,
        merged: int,
        parts: SourceParts | None = None,
    ) -> Iterator[tuple[Range, ...]]:
        number = self._worker_data.count + 1
        feed = DataClient(self._fleet, trainer, number, size, epochs, seed, parts)
        return feed.steps(self._worker_data, batch, merged)

    @override
    def add_data_wait(self, nanoseconds: int) -> None:
        self._fleet.times.data += nanoseconds

    @override
    def stats(self) -> list[dict[str, Any]]:
        """Return the figures of each server, such as its number of pushes.

        Server 0 hears of every push. The other servers count only those that have ids or weights for them.
        """
        return [
            figures_of(shard_pb2.StatusReply.FromString(reply))
            for reply in wait_all(self._fleet.to_all("Shard/Status", shard_pb2.StatusRequest()))
        ]

    @override
    def scale(self, servers: int) -> None:
        request = coordinator_pb2.ScaleRequest(servers=servers)
        first = self._fleet.clients[0]
        wait_all([first.start("Coordinator/Scale", request.SerializeToString())])

    @override
    def stage_links(self, place: StagePosition, queue_size: int) -> "StageLinks":
        from psfleet_worker.stage_links import StageLinks  # loads zmq

        self._links = StageLinks(place, queue_size, self._fleet.patience.wait, self._fleet.access)
        return self._links

    @override
    def abandon(self) -> None:
        self._closed = True
        self._fleet.close()
        self._transfers.close()
        self._marks.close()
        self._end_traces()

    @override
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
            self._fleet.send_last_figures()
            self._marks.say_goodbye()
            self._fleet.run(self._session.leave())
        finally:
            if self._links is not None:
                self._links.close()
            self._transfers.close()
            self._fleet.close()
            self._marks.close()
            self._end_traces()

    def _end_traces(self) -> None:
        if self._tracing is not None:
            self._tracing.close()
