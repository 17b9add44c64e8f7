"""ScriptRuntime: a Runtime with what a whole script needs besides its tables; the base class of all runtimes.

`psfleet.core.engine.interface.Runtime` is enough to train on tables. A script also loops over data, switches
modes, scales its fleet and goes on after a restart. What every runtime can answer is a member of
ScriptRuntime. What exists only in a cluster is behind `ScriptRuntime.cluster`, which is None elsewhere, so
that a type checker finds callers that forget the other case.

A member with a default need not be written in a runtime for which the default is right. A ForwardingRuntime
forwards every member; `tests/fleet/test_process_runtime.py` checks that.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from psfleet.core.engine.consistency import ConsistencyMode
from psfleet.core.engine.interface import FollowedCut, Gradient, PendingPush, ReadVersion, Runtime
from psfleet.core.engine.non_finite_check import NonFiniteCheck
from psfleet.core.engine.round_plan import Range, SourceParts
from psfleet.core.engine.shard.membership_view import Position
from psfleet.core.engine.worker_state import ScriptProgress
from psfleet.core.runtime.stages import Links, StagePosition
from psfleet.core.runtime.strategy import ConsistencySettings, WireSettings


class Cluster(Protocol):
    """A worker's part of a cluster, besides its tables."""

    @property
    def mode(self) -> ConsistencyMode:
        """Mode in which the fleet runs, with the settings that servers know.

        It differs from the requested mode if the fleet has switched before this incarnation began.
        """

    @property
    def watch(self) -> NonFiniteCheck:
        """NaN/Inf check of outgoing gradients."""

    @property
    def progress(self) -> ScriptProgress:
        """Progress of the script, over all incarnations of this worker."""

    @property
    def step(self) -> int:
        """Number of this incarnation's last push."""

    @property
    def collectives(self) -> tuple[int, int]:
        """Number of collectives of this incarnation so far, and of mode switches among them."""

    def pass_collectives(self, collectives: int, changes: int) -> None:
        """Count collectives and mode switches of a part of the script that is passed over."""

    def keep(self, state_at: Callable[[int, Callable[[], bool]], bytes]) -> bytes:
        """Put the script's state into snapshots, and return the state with which the script goes on.

        Args:
            state_at: Returns the state (JSON) after the push that a snapshot ends with, as
                psfleet.core.engine.worker_state.WorkerState.state_at does. It is called by another thread.

        Returns:
            State (JSON) in the snapshot that the fleet has started from, or b"" without one.
        """

    @property
    def newest_snapshot(self) -> tuple[str, int] | None:
        """Folder of the job's newest snapshot, and the script's last push in it (0 if that is not known)."""

    def add_data_wait(self, nanoseconds: int) -> None:
        """Count time for which the script has waited for its data."""

    def stage_links(self, place: StagePosition, queue_size: int) -> Links:
        """Return links to this worker's other stages, which are open until the runtime is closed."""


class ScriptRuntime(Runtime, Protocol):
    """Runtime of a script or client: tables, data, modes, and access to the cluster if there is one.

    Attributes:
        wire: Compression of values and gradients on the wire.
    """

    wire: WireSettings

    @property
    def cluster(self) -> Cluster | None:
        """The worker's part of the cluster, or None if there is no cluster or this runtime only reads."""
        return None

    @property
    def pushes(self) -> int:
        """Number of pushes of this script, over all incarnations of this worker."""
        return 0

    @property
    def version(self) -> ReadVersion | None:
        """Version of the values of the last pull, which only a reader of a running job knows; else None."""
        return None

    @property
    def cut(self) -> FollowedCut | None:
        """Cut of the training that the values are of, which only a follower knows; else None."""
        return None

    def set_mode(self, consistency: ConsistencySettings) -> None:
        """Switch to another mode; all workers must call this between the same two steps.

        Embedded, where all modes are the same, it does nothing.

        Raises:
            ConfigError: Workers ask for different modes; nothing was changed.
            UsageError: The runtime only reads.
        """

    def scale(self, servers: int) -> None:
        """Ask for another number of servers, which takes effect after one of the next collectives.

        Embedded, where there are no servers, it does nothing.

        Raises:
            ConfigError: No launcher would start the servers.
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
        """Yield the positions of this worker's samples (psfleet.core.engine.round_plan), step by step.

        In a cluster the fleet assigns them. A single worker gets one batch after the other.

        Args:
            trainer: Runtime that the script trains with, which flushes and makes steps without gradients.
            size: Number of samples of an epoch.
            batch: Number of samples of a step.
            epochs: Number of epochs.
            seed: Seed of the order of samples; only compared between workers.
            merged: Number of steps of one push.
            parts: Parts of a source that grows, the same for all workers, or None for any other source.
        """
        for start in range(0, epochs * size, size):
            for low in range(start, start + size, batch):
                yield ((low, min(low + batch, start + size)),)

    def skip_step(self) -> None:
        """Make a step of `data_steps` for which the script has pushed nothing."""
        self.push([])

    @property
    def next_ranges(self) -> tuple[Range, ...]:
        """Positions of the step after the present one of `data_steps`, or () if they are not known."""
        return ()


class ClusterLike(ScriptRuntime, Cluster, Protocol):
    """Runtime of a cluster, in front of which modes put their own.

    psfleet_worker.cluster_runtime.ClusterRuntime derives from it; the library cannot import that class.
    """

    @property
    def position(self) -> Position:
        """Position of the script in its data: number of used leases, and of samples of the next one."""

    def push(
        self,
        gradients: Sequence[Gradient],
        *,
        samples: int = 0,
        loss: float | None = None,
        position: Position | None = None,
    ) -> PendingPush:
        """Push as Runtime.push does; `position` is the one after the last step of these gradients."""

    def take_mode_request(self) -> tuple[str, dict[str, int]] | None:
        """Return the mode that the last barrier asks for, by name and settings, and clear the request."""

    def abandon(self) -> None:
        """Release all resources without telling the fleet, as if this process had died."""
