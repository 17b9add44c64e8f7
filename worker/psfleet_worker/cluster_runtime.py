"""The parameters of a cluster as one worker sees them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base import faults
from psfleet.core.base.errors import ConfigError
from psfleet.core.base.faults import Send
from psfleet.core.base.observability.tracing import open_tracing
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.base.threads import deferred
from psfleet.core.engine.consistency import ConsistencyMode, find_mode
from psfleet.core.engine.gradient_checks import check_reduction
from psfleet.core.engine.interface import (
    CompletedPush,
    Gradient,
    PendingPush,
    PushCounter,
    TableState,
    with_counts,
)
from psfleet.core.engine.non_finite_check import NonFiniteCheck
from psfleet.core.engine.round_plan import Range, SourceParts
from psfleet.core.engine.rules import import_rules
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.membership_view import Position
from psfleet.core.engine.worker_state import ScriptProgress
from psfleet.core.net.v1 import coordinator_pb2, shard_pb2
from psfleet.core.runtime.stages import StagePosition
from psfleet.core.runtime.strategy import WireSettings
from psfleet_worker.connection.call import wait_all
from psfleet_worker.connection.connection import FleetConnection
from psfleet_worker.connection.server_client import figures_of
from psfleet_worker.data_client import DataClient, Pusher
from psfleet_worker.session.data_shares import WorkerData
from psfleet_worker.session.instructions import CollectiveResult
from psfleet_worker.session.retries import Patience
from psfleet_worker.session.worker_session import Collectives
from psfleet_worker.snapshot_marks import SnapshotMarks, StateAt
from psfleet_worker.tensors.transfers import Transfers
from psfleet_worker.tensors.whole_tables import WorkerTables
from psfleet_worker.worker_metrics import StepTimes

if TYPE_CHECKING:
    from psfleet_worker.stage_links import StageLinks

Floats = NDArray[np.float32]


class ClusterRuntime:
    """Implements psfleet.core.engine.interface.Runtime on the servers of a cluster.

    Steps are a stream of pushes and pulls (`session`, `stream`). Whatever else a script asks for
    waits until the pushes before it are applied: collectives, whole tables, snapshots.

    Args:
        environment: Seat of this worker, and endpoints of the servers.
        mode: The same for all workers; a name stands for the mode with its usual settings.
        inject_faults: Wraps the function that sends the calls to one server, for tests, such as
            `psfleet_launch.chaos.message_faults.MessageFaults`.

    Attributes:
        wire: The argument, or its default.
        counters: Count what this worker's pushes take along.
    """

    pools = True

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
        chaos = faults.chaos()
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
        # What is wholly theirs is handed out as theirs, without a call between.
        self.create, self.open = self._tables.create, self._tables.open
        self.evictions = self._tables.evictions
        self.pull, self.pull_ahead = self._transfers.pull, self._transfers.pull_ahead
        self.flush = self._transfers.flush
        self._mode_request: tuple[str, dict[str, int]] | None = None
        self._closed = False
        self._links: StageLinks | None = None
        self._worker_data = WorkerData(self._session)
        self._collectives = Collectives(
            self._session, self._fleet.stream, lambda: self._worker_data.reached
        )
        try:
            self._fleet.start()
            # Server 0 cannot know ports that the others have chosen.
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
    def watch(self) -> NonFiniteCheck:
        """NaN/Inf check of outgoing gradients."""
        return self._transfers.watch

    @property
    def times(self) -> StepTimes:
        """Durations of this worker's steps."""
        return self._fleet.times

    @property
    def transports(self) -> list[str]:
        """Transport of tensors to each server now: "http2" or "grpcio"."""
        return [client.transport for client in self._fleet.clients]

    @property
    def worker_index(self) -> int:
        """Seat of this worker, from 0."""
        return self._fleet.worker

    @property
    def worker_num(self) -> int:
        """Number of workers in the fleet."""
        return self._fleet.workers

    @property
    def server_num(self) -> int:
        """Number of servers."""
        return len(self._fleet.clients)

    @property
    def pushes(self) -> int:
        """Number of pushes of this script, over all incarnations of this worker."""
        return self.progress.pushes

    @property
    def progress(self) -> ScriptProgress:
        """Position of the script, over all incarnations of this worker."""
        return self._session.progress

    @property
    def passes(self) -> bool:
        """The next collective was over before this incarnation began."""
        return self._session.passes

    @property
    def collectives(self) -> tuple[int, int]:
        """Collectives of this incarnation so far, and mode switches among them."""
        return self._session.collectives, self._session.changes

    def pass_collectives(self, collectives: int, changes: int) -> None:
        """Count these as come to, in a part of the script that is passed over."""
        self._session.pass_collectives(collectives, changes)

    @property
    def mode(self) -> ConsistencyMode:
        """The mode in which the fleet runs, with the settings that servers know: another one than was asked
        for, if the mode has been changed before this incarnation began."""
        return self._session.declared

    # -- training ------------------------------------------------------------------------------

    @property
    def reads_ahead(self) -> bool:
        """`pull_ahead` reads while the worker computes; not in modes whose pulls wait for other workers."""
        return self._fleet.stream.reads_ahead

    @property
    def position(self) -> Position:
        """Position of the script in its data: leases used up, and samples of the next one."""
        return self._worker_data.position or (0, 0)

    def push(
        self,
        gradients: Sequence[Gradient],
        *,
        samples: int = 0,
        loss: float | None = None,
        position: Position | None = None,
    ) -> PendingPush:
        """Push the gradients of one step. An earlier incarnation's push that counts is passed over.

        `position`: How far the script was with its data after the step; None: where it is now.
        """
        if self.counters:
            gradients = with_counts(gradients, self.counters)
        position = position or self._worker_data.position or (0, 0)
        ticket: PendingPush = CompletedPush()
        if not self._session.progress.passes():
            if self._audit is not None:
                gradients = [*gradients, self._audited(self._audit)]
            ticket = self._transfers.push(gradients, samples, loss, position)
        for counter in self.counters:  # what left with a push that counts already counts with it
            counter.arrived()
        return ticket

    def push_counts(self) -> None:
        """Push what counters hold, by itself. In sync mode it is this worker's part of a round."""
        self.push([])

    def _audited(self, audit: Any) -> Gradient:
        """Return the gradient that counts this push on every server under `psfleet-launch --chaos`."""
        if audit.spec.key not in self._tables.specs:
            self.create(audit.spec)
        gradient: Gradient = audit.gradient(self._session.declared.adds_deltas)
        return gradient

    # -- collectives ------------------------------------------------------------------------------

    @deferred()
    def barrier(self, timeout: float | None = None) -> None:
        """Wait for all workers. Sync mode: rounds of the others go on without this worker."""
        with self._marks.blocking():
            result: CollectiveResult = self._transfers.run(
                self._collectives.gather(), timeout=timeout
            )
        self._mode_request = result.mode_request

    def take_mode_request(self) -> tuple[str, dict[str, int]] | None:
        """Return mode and settings of a request from outside the script, if the last barrier announced it.

        All workers get it at the same barrier: each of them then comes to `set_mode`.
        """
        mode_request, self._mode_request = self._mode_request, None
        return mode_request

    @deferred()
    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        """Combine a value of every worker; return the result."""
        check_reduction(mode)
        program = self._collectives.gather(mode, np.ascontiguousarray(value))
        with self._marks.blocking():
            result: NDArray[Any] = self._transfers.run(program).value
        return result.reshape(np.shape(value))

    @deferred()
    def set_mode(self, mode: ConsistencyMode) -> None:
        """Go on in another mode; every worker must come here between two of its steps.

        A worker that has started again passes over the changes that the fleet has behind it.

        Args:
            mode: The same on all workers.

        Raises:
            ConfigError: The workers want different things; nothing was changed.
        """
        conflict = mode.conflicts.get("wire")
        if conflict and self.wire != WireSettings():
            raise ConfigError(
                f"{self.wire} and the consistency mode {mode.name!r} contradict each other: {conflict}"
            )
        with self._marks.blocking():
            self._transfers.run(self._collectives.set_mode(mode))
        self._transfers.forget()
        self._transfers.begin()

    # -- whole tables --------------------------------------------------------------------------

    def read_table(self, table: int) -> TableState:
        """Return the whole content of a table."""
        self.flush()
        return self._tables.read(table)

    def write_table(self, table: int, state: TableState) -> None:
        """Replace the whole content of a table."""
        self.flush()
        self._transfers.forget()
        self._tables.write(table, state)

    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> int:
        """Remove rows that are worth little or not in use; return their number."""
        self.flush()
        return self._tables.shrink(table, threshold, unseen)

    def load(self, path: str) -> None:
        """Load all tables from a snapshot."""
        self.flush()
        self._transfers.forget()
        self._tables.load(path)

    def specs(self) -> dict[int, TableSpec]:
        """Return the definitions of the tables that this worker knows, by key."""
        return dict(self._tables.specs)

    # -- snapshots -----------------------------------------------------------------------------

    def save(self, path: str, *, delta: bool = False, base: bool = False) -> str:
        """Save a snapshot; return its path. The servers must see the same file system as this worker."""
        self.flush()
        return self._marks.take(path, delta=delta, base=base)

    def keep(self, state_at: StateAt) -> bytes:
        """Snapshots get what `state_at` gives of this worker; returns what it has kept in the one from
        which the fleet has started (JSON; empty: nothing).

        Args:
            state_at: Returns the state as of the number of its last push in the snapshot (below 0: of its
                last ones, see psfleet.core.engine.worker_state), and gets whether the script cannot end its
                step meanwhile; called by another thread.
        """
        self._marks.state_at = state_at
        return self._marks.introduce(keeps=True)

    @property
    def step(self) -> int:
        """Number of the last push."""
        return self._session.sequence

    @property
    def newest_snapshot(self) -> tuple[str, int] | None:
        """Folder of the newest of the job's snapshots, and the script's last push in it; 0: not known."""
        if self._marks.newest is None:
            return None
        folder, last = self._marks.newest
        return folder, self.pushes - (self._session.sequence - last) if last else 0

    # -- data ----------------------------------------------------------------------------------

    def data_steps(
        self,
        trainer: Pusher,
        size: int,
        batch: int,
        epochs: int,
        seed: int,
        merged: int,
        parts: SourceParts | None = None,
    ) -> Iterator[tuple[Range, ...]]:
        """Yield this worker's samples, step by step, as the fleet assigns them.

        Args:
            trainer: Runtime that pushes.
            size: Samples of an epoch.
            batch: Samples of a step.
            epochs: Number of epochs.
            seed: Seed of the order of samples; only compared between workers.
            merged: Steps of one push.
            parts: Of a source that has more and more, for all workers alike; None: it has not.

        Returns:
            For each step the positions of its samples (psfleet.core.engine.round_plan).
        """
        number = self._worker_data.count + 1
        feed = DataClient(self._fleet, trainer, number, size, epochs, seed, parts)
        return feed.steps(self._worker_data, batch, merged)

    @property
    def in_round(self) -> bool:
        """The script is in a step of `data_steps` in which it may push once."""
        return self._worker_data.in_round

    @property
    def next_ranges(self) -> tuple[Range, ...]:
        """Positions of the step after the present one of `data_steps`, if they are known; else empty."""
        return self._worker_data.next_ranges

    # -- the rest ------------------------------------------------------------------------------

    def stats(self) -> list[dict[str, Any]]:
        """Return one entry per server. Server 0 counts every push, the others those that they receive."""
        return [
            figures_of(shard_pb2.StatusReply.FromString(reply))
            for reply in wait_all(self._fleet.to_all("Shard/Status", shard_pb2.StatusRequest()))
        ]

    def scale(self, servers: int) -> None:
        """Ask for another number of servers: workers go on with it after one of their next collectives."""
        request = coordinator_pb2.ScaleRequest(servers=servers)
        first = self._fleet.clients[0]
        wait_all([first.start("Coordinator/Scale", request.SerializeToString())])

    def stage_links(self, place: StagePosition, queue_size: int) -> "StageLinks":
        """Return the way to the other stages of this worker; it is open until this runtime is closed."""
        from psfleet_worker.stage_links import StageLinks  # loads zmq

        self._links = StageLinks(place, queue_size, self._fleet.patience.wait, self._fleet.access)
        return self._links

    def abandon(self) -> None:
        """Let go of every resource without a word to the fleet, as if this process had died."""
        self._closed = True
        self._fleet.close()
        self._transfers.close()
        self._marks.close()
        self._end_traces()

    def close(self) -> None:
        """Flush, leave the fleet and release all resources."""
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
