"""The parameters of a cluster as one worker sees them."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from psfleet.chaos.injection import FaultInjector, PushAudit
from psfleet.consistency import ConsistencyMode, find_mode
from psfleet.data.assignment import Range
from psfleet.data.progress import ScriptProgress
from psfleet.errors import ConfigError, UsageError
from psfleet.observability.tracing import open_tracing
from psfleet.platform.interrupts import deferred
from psfleet.rules import import_rules
from psfleet.runtime.completed import CompletedPush
from psfleet.runtime.evicted_ids import EvictedIds
from psfleet.runtime.finiteness import NonFiniteCheck
from psfleet.runtime.interface import (
    Gradient,
    PendingPull,
    PendingPush,
    PushCounter,
    Read,
    TableState,
    with_counts,
)
from psfleet.schema.table import TableSpec
from psfleet.settings.environment import Environment
from psfleet.settings.mode_names import Mode
from psfleet.shard.events import Correction
from psfleet.shard.membership_view import Position
from psfleet.stages.links import StagePosition
from psfleet.strategy import WireSettings
from psfleet.wire.v1 import shard_pb2
from psfleet_worker.connection.call import wait_all
from psfleet_worker.connection.connection import FleetConnection
from psfleet_worker.connection.server_client import Send
from psfleet_worker.connection.server_stats import figures_of
from psfleet_worker.connection.worker_heartbeat import Listener
from psfleet_worker.data_client import DataClient, Pusher
from psfleet_worker.observability.step_times import StepTimes
from psfleet_worker.session.collectives import Collectives
from psfleet_worker.session.data_shares import WorkerData
from psfleet_worker.session.instructions import CollectiveResult
from psfleet_worker.session.retries import Patience
from psfleet_worker.sharding.worker_tables import WorkerTables
from psfleet_worker.snapshot_request import save
from psfleet_worker.stream.snapshot_marks import SnapshotMarks
from psfleet_worker.stream.transfers import Transfers

if TYPE_CHECKING:
    from psfleet_worker.stages.stage_links import StageLinks

__all__ = ["ClusterRuntime"]

Floats = NDArray[np.float32]


class ClusterRuntime:
    """Implements psfleet.runtime.interface.Runtime on the servers of a cluster.

    Steps are a stream of pushes and pulls (`session`, `stream`). Whatever else a script asks for
    waits until the pushes before it are applied: meetings, whole tables, snapshots.

    Args:
        environment: Says which worker this is and where the servers are.
        mode: The same for all workers; a name stands for the mode with its usual settings.
        wire: In which form gradients and values travel.
        patience: How long to wait for whom.
        meddle: For tests, see psfleet.faults.crash_points.

    Attributes:
        wire: As passed.
        counters: Count what this worker's pushes take along.
    """

    def __init__(
        self,
        environment: Environment,
        mode: ConsistencyMode | Mode,
        wire: WireSettings | None = None,
        *,
        patience: Patience | None = None,
        meddle: Callable[[int, Send], Send] | None = None,
    ) -> None:
        if environment.role != "worker":
            raise ConfigError(
                f"the role is {environment.role!r}; a cluster's runtime is for "
                "workers (PSFLEET_ROLE=worker)"
            )
        import_rules(environment.rules, environment.rules_folder)
        meddle = meddle or FaultInjector.wanted(environment.rank)
        self._tracing = open_tracing(environment)
        declared = find_mode(mode) if isinstance(mode, str) else mode
        self._fleet = FleetConnection(
            environment, declared, patience or Patience.of(environment), meddle
        )
        self.wire = wire or WireSettings()
        self.counters: list[PushCounter] = []
        self._session = self._fleet.session
        self._marks = SnapshotMarks(self._fleet)
        self._fleet.beats.listeners.append(self._marks.listen)
        self._tables = WorkerTables(self._fleet)
        self._transfers = self._make_transfers()
        self._wish: tuple[str, dict[str, int]] | None = None
        self._closed = False
        self._links: StageLinks | None = None
        self._shares = WorkerData(self._session)
        self._collectives = Collectives(
            self._session, self._fleet.stream, lambda: self._shares.reached
        )
        try:
            self._fleet.start()
            # Server 0 cannot know ports that the others have chosen.
            self._marks.introduce(keeps=False)
        except BaseException:
            self._fleet.close()
            self._end_traces()
            raise
        self._audit = PushAudit.wanted(
            self.worker_index, self._session.incarnation, self.server_num
        )
        self._transfers.begin()

    def _make_transfers(self) -> Transfers:
        if self._tracing is None:
            return Transfers(self._fleet, self._tables.spec, self.wire)
        from psfleet_worker.stream.traced_transfers import TracedTransfers

        return TracedTransfers(self._tracing, self._fleet, self._tables.spec, self.wire)

    @property
    def watch(self) -> NonFiniteCheck:
        """Who looks for values that are not finite."""
        return self._transfers.watch

    @property
    def times(self) -> StepTimes:
        """How long this worker's steps take."""
        return self._fleet.times

    @property
    def transports(self) -> list[str]:
        """What carries tensors to each server now: "http2" or "grpcio"."""
        return [client.transport for client in self._fleet.clients]

    @property
    def worker_index(self) -> int:
        """See Runtime."""
        return self._fleet.worker

    @property
    def worker_num(self) -> int:
        """See Runtime."""
        return self._fleet.workers

    @property
    def server_num(self) -> int:
        """See Runtime."""
        return len(self._fleet.clients)

    @property
    def pushes(self) -> int:
        """See psfleet.runtime.interface.pushes."""
        return self.progress.pushes

    @property
    def progress(self) -> ScriptProgress:
        """How far the script is, over all lives of this worker."""
        return self._session.progress

    @property
    def passes(self) -> bool:
        """Whether the next meeting was over before this life began."""
        return self._session.passes

    @property
    def meetings(self) -> tuple[int, int]:
        """How many meetings this life has come to, and how many changes of the mode are among them."""
        return self._session.meetings, self._session.changes

    def pass_meetings(self, meetings: int, changes: int) -> None:
        """Count these as come to, in a part of the script that is passed over."""
        self._session.pass_meetings(meetings, changes)

    @property
    def mode(self) -> ConsistencyMode:
        """The mode in which the fleet runs, with the settings that servers know: another one than was asked
        for, if the mode has been changed before this life began."""
        return self._session.declared

    def correct(self, correction: Correction) -> None:
        """Let the servers correct the pushes to come if they are late."""
        self._fleet.correction = correction

    # -- training ------------------------------------------------------------------------------

    @property
    def pools(self) -> bool:
        """See Runtime."""
        return True

    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        """See Runtime.create. The worker that server 0 hears first gives the value everywhere."""
        return self._tables.create(spec, value)

    def open(self, name: str) -> TableSpec:
        """See Runtime.open."""
        return self._tables.open(name)

    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        """See Runtime.pull."""
        return self._transfers.pull(reads)

    @property
    def reads_ahead(self) -> bool:
        """See Runtime. In modes whose pulls wait for other workers nothing overtakes anything."""
        return self._fleet.stream.reads_ahead

    def pull_ahead(self, reads: Sequence[Read]) -> PendingPull:
        """See Runtime.pull_ahead."""
        return self._transfers.pull_ahead(reads)

    @property
    def position(self) -> Position:
        """How far the script is with its data: leases used up, and samples of the next one."""
        return self._shares.position or (0, 0)

    def push(
        self,
        gradients: Sequence[Gradient],
        *,
        samples: int = 0,
        loss: float | None = None,
        position: Position | None = None,
    ) -> PendingPush:
        """See Runtime.push. A push of an earlier life that counts is passed over.

        `position`: How far the script was with its data after the step; None: where it is now.
        """
        gradients = with_counts(gradients, self.counters)
        position = position or self.position
        pushed: PendingPush = CompletedPush()
        if not self.progress.passes():
            pushed = self._push(gradients, samples, loss, position)
        for counter in self.counters:  # what left with a push that counts already counts with it
            counter.arrived()
        return pushed

    def push_counts(self) -> None:
        """Push what counters hold, by itself. In sync mode it is this worker's part of a round."""
        self.push([])

    def _push(
        self, gradients: Sequence[Gradient], samples: int, loss: float | None, position: Position
    ) -> PendingPush:
        if self._audit is not None:
            gradients = [*gradients, self._audited(self._audit)]
        return self._transfers.push(gradients, samples, loss, position)

    def _audited(self, audit: PushAudit) -> Gradient:
        """Under `psfleet-launch --chaos`: what counts this push on every server."""
        if audit.spec.key not in self._tables.specs:
            self.create(audit.spec)
        return audit.gradient(self._session.declared.adds_deltas)

    def flush(self, timeout: float | None = None) -> None:
        """See Runtime.flush."""
        self._transfers.flush(timeout)

    # -- meetings ------------------------------------------------------------------------------

    @deferred()
    def barrier(self, timeout: float | None = None) -> None:
        """See Runtime.barrier. Sync mode: rounds of the others go on without this worker."""
        released: CollectiveResult = self._transfers.run(
            self._collectives.gather(), timeout=timeout
        )
        self._wish = released.wish

    def take_wish(self) -> tuple[str, dict[str, int]] | None:
        """The mode and its settings that somebody outside wants, if the last barrier has told all workers
        so: each of them then comes to `set_mode`."""
        wish, self._wish = self._wish, None
        return wish

    @deferred()
    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        """See Runtime.all_reduce."""
        if mode not in ("sum", "max", "min"):
            raise UsageError(f"all_reduce mode is {mode!r}; it must be sum, max or min")
        gathered = self._collectives.gather(mode, np.ascontiguousarray(value))
        found: NDArray[Any] = self._transfers.run(gathered).value
        return found.reshape(np.shape(value))

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
        self._transfers.run(self._collectives.set_mode(mode))
        self._transfers.forget()
        self._transfers.begin()

    # -- whole tables --------------------------------------------------------------------------

    def read_table(self, table: int) -> TableState:
        """See Runtime.read_table."""
        self.flush()
        return self._tables.read(table)

    def write_table(self, table: int, state: TableState) -> None:
        """See Runtime.write_table."""
        self.flush()
        self._transfers.forget()
        self._tables.write(table, state)

    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> int:
        """See Runtime.shrink."""
        self.flush()
        return self._tables.shrink(table, threshold, unseen)

    def evictions(self, table: int, position: Sequence[int], limit: int) -> list[EvictedIds]:
        """See Runtime.evictions."""
        return self._tables.evictions(table, position, limit)

    def load(self, path: str) -> None:
        """See Runtime.load."""
        self.flush()
        self._transfers.forget()
        self._tables.load(path)

    def specs(self) -> dict[int, TableSpec]:
        """See Runtime.specs."""
        return dict(self._tables.specs)

    # -- snapshots -----------------------------------------------------------------------------

    def save(self, path: str, *, delta: bool = False, base: bool = False) -> str:
        """See Runtime.save. The servers must see the same file system as this worker."""
        self.flush()
        return save(self._fleet, path, delta=delta, base=base)

    def keep(self, state_at: Callable[[int], bytes]) -> bytes:
        """Snapshots get what `state_at` gives of this worker; returns what it has kept in the one from
        which the fleet has started (JSON; empty: nothing).

        Args:
            state_at: Of the number of its last push in the snapshot (below 0: of its last ones, see
                psfleet.data.worker_state); called by another thread.
        """
        self._marks.state_at = state_at
        return self._marks.introduce(keeps=True)

    @property
    def step(self) -> int:
        """Number of the last push."""
        return self._session.sequence

    # -- data ----------------------------------------------------------------------------------

    def shares(
        self, trainer: Pusher, size: int, batch: int, epochs: int, seed: int, merged: int
    ) -> Iterator[tuple[Range, ...]]:
        """What this worker has to train with, step by step, as the fleet hands it out.

        Args:
            trainer: Who pushes.
            size: Samples of an epoch.
            batch: Samples of a step.
            epochs: How many epochs.
            seed: Of the order of samples; only compared between workers.
            merged: Steps of one push.

        Returns:
            For each step the positions of its samples (psfleet.data.assignment).
        """
        feed = DataClient(self._fleet, trainer, self._shares.count + 1, size, epochs, seed)
        return feed.steps(self._shares, batch, merged)

    @property
    def coming(self) -> tuple[Range, ...]:
        """Of the step after the present one of `shares`: its positions, if they are known; else empty."""
        return self._shares.coming

    def on_beat(self, listener: Listener) -> None:
        """Let `listener` hear what the coordinator answers to signs of life, in their thread."""
        self._fleet.beats.listeners.append(listener)

    # -- the rest ------------------------------------------------------------------------------

    def stats(self) -> list[dict[str, Any]]:
        """See Runtime.stats. Server 0 counts every push, the others those that they are sent."""
        return [
            figures_of(shard_pb2.StatusReply.FromString(answer))
            for answer in wait_all(self._fleet.to_all("Shard/Status", shard_pb2.StatusRequest()))
        ]

    def stage_links(self, place: StagePosition, queue_size: int) -> "StageLinks":
        """The way to the other stages of this worker; it is open until this runtime is closed."""
        from psfleet_worker.stages.stage_links import StageLinks  # loads zmq

        self._links = StageLinks(place, queue_size, self._fleet.patience.wait, self._fleet.access)
        return self._links

    def abandon(self) -> None:
        """Let go of every resource without a word to the fleet, as if this process had died."""
        self._closed = True
        self._fleet.close()
        self._transfers.close()
        self._end_traces()

    def close(self) -> None:
        """See Runtime.close."""
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
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
