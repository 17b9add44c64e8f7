"""ScriptRuntime: a Runtime with what a whole script needs besides its tables; the base class of all runtimes.

`psfleet.core.engine.runtime_interface.Runtime` is enough to train on tables. A script also loops over data,
switches modes, changes the number of servers and continues after a restart. Calls that every runtime
supports are members of ScriptRuntime. Calls that exist only in a cluster are members of
`ScriptRuntime.cluster`, which is None elsewhere, so that a type checker finds callers that forget the case
without a cluster.

Some members have a default; a runtime overrides them only if it differs. A ForwardingRuntime forwards every
member; `tests/fleet/test_process_runtime.py` checks that.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from psfleet.core.engine.consistency import ConsistencyMode
from psfleet.core.engine.non_finite_check import NonFiniteCheck
from psfleet.core.engine.round_plan import Range, SourceParts
from psfleet.core.engine.runtime_interface import (
    FollowedCut,
    Gradient,
    PendingPush,
    ReadVersion,
    Runtime,
)
from psfleet.core.engine.shard.membership_view import Position
from psfleet.core.engine.worker_state import ScriptProgress
from psfleet.core.runtime.stages import Links, StagePosition
from psfleet.core.runtime.strategy import ConsistencySettings, WireSettings


class Cluster(Protocol):
    """Calls of a worker that exist only in a cluster."""

    @property
    def mode(self) -> ConsistencyMode:
        """Present consistency mode of the fleet, with the settings that servers know.

        It differs from the requested mode if the fleet has switched its mode before this process joined.
        """

    @property
    def watch(self) -> NonFiniteCheck:
        """Check for NaN and infinity in the gradients that this worker sends."""

    @property
    def progress(self) -> ScriptProgress:
        """Progress of the script, including that of the worker's earlier processes."""

    @property
    def step(self) -> int:
        """Number of the last push of this process."""

    @property
    def collectives(self) -> tuple[int, int]:
        """Number of collectives (such as barriers) of this process, and of mode switches among them."""

    def pass_collectives(self, collectives: int, changes: int) -> None:
        """Count the collectives of a part of the script that a restarted worker skips.

        `changes`: Number of mode switches among the `collectives`.
        """

    def keep(self, state_at: Callable[[int, Callable[[], bool]], bytes]) -> bytes:
        """Add the script's state to snapshots, and return the state that the script must restore now.

        Args:
            state_at: Returns the state (JSON) after a given push, the last one in a snapshot, as
                psfleet.core.engine.worker_state.WorkerState.state_at does. Another thread calls it.

        Returns:
            State (JSON) in the snapshot that the fleet has loaded at its start, or b"" without a snapshot.
        """

    @property
    def newest_snapshot(self) -> tuple[str, int] | None:
        """Folder of the job's newest snapshot, and the script's last push in it (0 if it is not known)."""

    def add_data_wait(self, nanoseconds: int) -> None:
        """Add time for which the script has waited for its data, for metrics."""

    def stage_links(self, place: StagePosition, queue_size: int) -> Links:
        """Return links to the other processes of this worker's pipeline. Closing the runtime closes them.

        Args:
            queue_size: Number of messages to a process that may wait before `send` blocks.
        """


class ScriptRuntime(Runtime, Protocol):
    """Runtime of a script or client: tables, data, modes, and access to the cluster if there is one.

    Attributes:
        wire: Compression of values and gradients during transfer.
    """

    wire: WireSettings

    @property
    def cluster(self) -> Cluster | None:
        """Calls that exist only in a cluster, or None if there is no cluster or this runtime only reads."""
        return None

    @property
    def pushes(self) -> int:
        """Number of pushes of this script, including those of the worker's earlier processes."""
        return 0

    @property
    def version(self) -> ReadVersion | None:
        """Version of the last pulled values: the rounds and updates that they include.

        Only a reader (a process that reads the tables of a running job) has one; None for other runtimes.
        """
        return None

    @property
    def cut(self) -> FollowedCut | None:
        """State of the training that the values belong to.

        Only a follower (a process with an up-to-date copy of a running job's weights) has one. None for
        other runtimes.
        """
        return None

    def set_mode(self, consistency: ConsistencySettings) -> None:
        """Switch to another consistency mode. All workers must call this between the same two steps.

        In an embedded runtime all modes are the same, and the call does nothing.

        Raises:
            ConfigError: Workers request different modes; nothing was changed.
            UsageError: The runtime only reads.
        """

    def scale(self, servers: int) -> None:
        """Request another number of servers. It takes effect after one of the next collectives.

        An embedded runtime has no servers, and the call does nothing.

        Raises:
            ConfigError: No launcher is there to start the servers.
            UsageError: The runtime only reads.
        """

    def data_steps(
        self,
        trainer: "ScriptRuntime",
        size: int,
        batch: int,
        epochs: int,
        seed: int,
        merged: int,
        parts: SourceParts | None = None,
    ) -> Iterator[tuple[Range, ...]]:
        """Yield for each step the positions of this worker's samples (psfleet.core.engine.round_plan).

        In a cluster the fleet assigns the samples. Without a cluster the worker gets one batch after the
        other.

        Args:
            trainer: Runtime that the script trains with. It is used to flush, and to make steps without
                gradients.
            size: Number of samples of an epoch.
            seed: Seed of the order of samples. It is only compared between workers.
            merged: Number of steps of one push.
            parts: Parts of a source that can grow while it is read, such as the partitions of a topic. They
                must be the same in all workers. None for any other source.
        """
        for start in range(0, epochs * size, size):
            for low in range(start, start + size, batch):
                yield ((low, min(low + batch, start + size)),)

    def skip_step(self) -> None:
        """Push without gradients, for a step of `data_steps` in which the script has pushed nothing."""
        self.push([])

    @property
    def next_ranges(self) -> tuple[Range, ...]:
        """Positions of the samples of the next step of `data_steps`, or () if they are not known yet."""
        return ()


class ClusterLike(ScriptRuntime, Cluster, Protocol):
    """Runtime of a cluster, which the runtimes of consistency modes wrap.

    psfleet_worker.cluster_runtime.ClusterRuntime derives from it; the library cannot import that class.
    """

    @property
    def position(self) -> Position:
        """Position of the script in its data: number of used leases, and of used samples of the next lease.

        A lease is a set of samples that the fleet has assigned to this worker.
        """

    def push(
        self,
        gradients: Sequence[Gradient],
        *,
        samples: int = 0,
        loss: float | None = None,
        position: Position | None = None,
    ) -> PendingPush:
        """Push as Runtime.push does.

        `position` is the script's position after the last step of these gradients.
        """

    def take_mode_request(self) -> tuple[str, dict[str, int]] | None:
        """Return the mode that was requested by `psfleet mode`, and clear the request.

        Returns:
            Name and settings of the mode, as the last barrier has reported them, or None without a request.
        """

    def abandon(self) -> None:
        """Release all resources without notifying the fleet, as if this process had died."""
