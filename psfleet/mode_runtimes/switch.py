"""The runtime of a cluster in the mode that the strategy says, which may be changed on the way."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from psfleet.consistency import ConsistencyMode, find_part
from psfleet.errors import ConfigError
from psfleet.platform.notices import say
from psfleet.runtime import interface as runtimes
from psfleet.runtime.forwarding import ForwardingRuntime
from psfleet.runtime.interface import PendingPull, Read, Runtime
from psfleet.runtime.read_only import ReadOnlyRuntime
from psfleet.settings.environment import Environment
from psfleet.settings.mode_names import Mode
from psfleet.shard.events import Correction
from psfleet.strategy import ConsistencySettings, Settings, WireSettings

__all__ = ["ClusterLike", "ModeSwitchRuntime", "change", "check_mode", "check_wire", "connect"]

Floats = NDArray[np.float32]


class ClusterLike(Runtime, Protocol):
    """The runtime of a cluster: psfleet_worker.cluster_runtime.ClusterRuntime."""

    @property
    def mode(self) -> ConsistencyMode:
        """The mode in which the fleet runs, with the settings that servers know."""

    def set_mode(self, mode: ConsistencyMode) -> None:
        """Tell the servers, together with all workers."""

    def correct(self, correction: Correction) -> None:
        """Let the servers correct the pushes to come if they are late."""

    def take_wish(self) -> tuple[str, dict[str, int]] | None:
        """The mode that the last barrier has told all workers to go on in; None: it has not."""

    def abandon(self) -> None:
        """Let go of everything as if this process had died."""


def connect(
    environment: Environment, consistency: ConsistencySettings, wire: WireSettings | None = None
) -> "ModeSwitchRuntime":
    """The cluster that the environment names, in this mode."""
    cluster: Any = runtimes.load_runtime("cluster", environment, consistency.declared, wire=wire)
    return ModeSwitchRuntime(cluster, consistency)


class ModeRuntime(Runtime, Protocol):
    """What a mode puts before the cluster, see `runtime` of psfleet.consistency.ConsistencyMode."""

    def release(self) -> None:
        """Let go of everything but the cluster."""


class ModeSwitchRuntime(ForwardingRuntime):
    """What scripts hold on to while the mode changes.

    Args:
        cluster: The cluster's runtime.
        consistency: The mode that was asked for.

    Attributes:
        consistency: The mode that it is in.
        check: Raises ConfigError if a mode does not go with the rest of the strategy; asked before the
            mode is changed from outside the script.
    """

    def __init__(self, cluster: ClusterLike, consistency: ConsistencySettings) -> None:
        super().__init__(cluster)
        self._cluster = cluster
        self.consistency = _settled(cluster, consistency)
        self.check: Callable[[ConsistencySettings], Any] = lambda wanted: None
        self._enter()

    def _enter(self) -> None:
        """Work as the mode says."""
        asked = self.consistency
        correction = Correction(asked.staleness_damping, asked.delay_compensation)
        self._cluster.correct(correction)
        self._front = _front(self._cluster, asked)
        self._fleet = self._cluster if self._front is None else self._front

    def set_mode(self, consistency: ConsistencySettings) -> None:
        """Go on in another mode; all workers must come here between the same two steps.

        Raises:
            ConfigError: They want different things; nothing was changed.
        """
        self._fleet.flush()
        self._cluster.set_mode(consistency.declared)
        self._release()
        self.consistency = _settled(self._cluster, consistency)
        self._enter()

    @property
    def pools(self) -> bool:
        """See Runtime."""
        return self._fleet.pools

    @property
    def reads_ahead(self) -> bool:
        """See Runtime."""
        return self._fleet.reads_ahead

    def pull_ahead(self, reads: Sequence[Read]) -> PendingPull:
        """See Runtime.pull_ahead."""
        return self._fleet.pull_ahead(reads)

    def barrier(self, timeout: float | None = None) -> None:
        """See Runtime.barrier. If somebody outside wants another mode, all workers go on in that."""
        self._fleet.barrier(timeout)
        wish = self._cluster.take_wish()
        if wish is not None:
            self._follow(*wish)

    def _follow(self, mode: str, settings: dict[str, int]) -> None:
        """Apply a mode request; refuse one that contradicts the strategy, on all workers alike."""
        try:
            wanted = Settings.from_parts({"consistency": {"mode": mode, **settings}}).consistency
            self.check(wanted)
        except ConfigError as error:
            say(f"the mode stays {self.consistency.mode!r}: {error}")
            return
        self.set_mode(wanted)

    def _release(self) -> None:
        if self._front is not None:
            self._front.release()

    def abandon(self) -> None:
        """Let go of every resource without a word to the fleet, as if this process had died."""
        self._cluster.abandon()
        self._release()


def change(runtime: Runtime, consistency: ConsistencySettings) -> None:
    """Let the runtime go on in another mode, if it is one of a cluster; embedded all modes are one.

    Raises:
        ConfigError: The workers ask for different things; nothing was changed.
        UsageError: The runtime only reads.
    """
    if isinstance(runtime, ModeSwitchRuntime):
        runtime.set_mode(consistency)
    elif isinstance(runtime, ReadOnlyRuntime):
        runtime.refuse("be put into another mode")


def check_mode(runtime: Runtime, mode: Mode, caller: str) -> None:
    """Refuse to join a runtime that is in another mode; embedded all modes are one.

    Raises:
        ConfigError: It is in another one.
    """
    found = getattr(runtime, "consistency", None)
    if found is not None and found.mode != mode:
        raise ConfigError(
            f"this process is in its fleet already, in mode {found.mode!r}, and {caller}() asks for "
            f"{mode!r}; name the same mode in both, or none in the second"
        )


def check_wire(runtime: Runtime, wire: WireSettings, caller: str) -> None:
    """Refuse to join a runtime whose values travel in another form.

    Raises:
        ConfigError: They do.
    """
    found = getattr(runtime, "wire", None)
    if found is not None and found != wire:
        raise ConfigError(
            f"this process is in its fleet already, with {found}, and {caller}() asks for {wire}; name the "
            "same in both, or none in the second"
        )


def _settled(cluster: ClusterLike, wanted: ConsistencySettings) -> ConsistencySettings:
    """What was asked for, or the mode that the fleet has come to in the meantime.

    Settings that servers do not know are then the usual ones until the script comes to the change that says
    them.
    """
    found = cluster.mode
    if wanted.declared.agreed() == found:
        return wanted
    return ConsistencySettings(cast(Mode, found.name), **found.agreed_settings)


def _front(cluster: ClusterLike, consistency: ConsistencySettings) -> ModeRuntime | None:
    """What stands before the cluster in this mode, if anything does."""
    if not consistency.declared.runtime:
        return None
    made: ModeRuntime = find_part(consistency.declared.runtime)(cluster, consistency)
    return made
