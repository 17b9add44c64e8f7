"""The runtime of a cluster in the mode that the strategy says, which may be changed on the way."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.logs import log_of
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.consistency import ConsistencyMode, find_part
from psfleet.core.engine.interface import Runtime, load_runtime
from psfleet.core.runtime.runtime_bases import ForwardingRuntime, ReadOnlyRuntime, handed_on
from psfleet.core.runtime.strategy import ConsistencySettings, Settings, WireSettings

_log = log_of(__name__)

Floats = NDArray[np.float32]


class ClusterLike(Runtime, Protocol):
    """The runtime of a cluster: psfleet_worker.cluster_runtime.ClusterRuntime."""

    @property
    def mode(self) -> ConsistencyMode:
        """The mode in which the fleet runs, with the settings that servers know."""

    def set_mode(self, mode: ConsistencyMode) -> None:
        """Tell the servers, together with all workers."""

    def take_mode_request(self) -> tuple[str, dict[str, int]] | None:
        """Return the mode in which the last barrier lets all workers go on; None: unchanged."""

    def scale(self, servers: int) -> None:
        """Ask for another number of servers."""

    def abandon(self) -> None:
        """Let go of everything as if this process had died."""


def connect(
    environment: Environment, consistency: ConsistencySettings, wire: WireSettings | None = None
) -> "ModeSwitchRuntime":
    """Return the cluster that the environment names, in this mode."""
    cluster: Any = load_runtime("cluster", environment, consistency.declared, wire=wire)
    return ModeSwitchRuntime(cluster, consistency)


class ModeRuntime(Runtime, Protocol):
    """Runtime that a mode puts before the cluster, see `runtime` of
    psfleet.core.engine.consistency.ConsistencyMode."""

    def release(self) -> None:
        """Let go of everything but the cluster."""


class ModeSwitchRuntime(ForwardingRuntime):
    """Runtime that scripts keep while the mode changes.

    Args:
        cluster: The cluster's runtime.
        consistency: The mode that was asked for.

    Attributes:
        consistency: The mode that it is in.
        check: Raises ConfigError if a mode does not go with the rest of the strategy; asked before the
            mode is changed from outside the script.
    """

    pools = property(attrgetter("_fleet.pools"))
    reads_ahead = property(attrgetter("_fleet.reads_ahead"))
    pull_ahead = handed_on(Runtime.pull_ahead)

    def __init__(self, cluster: ClusterLike, consistency: ConsistencySettings) -> None:
        super().__init__(cluster)
        self._cluster = cluster
        self.consistency = _settled(cluster, consistency)
        self.check: Callable[[ConsistencySettings], Any] = lambda settings: None
        self._enter()

    def _enter(self) -> None:
        """Work as the mode says."""
        self._front = _front(self._cluster, self.consistency)
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

    def barrier(self, timeout: float | None = None) -> None:
        """If somebody outside wants another mode, all workers go on in that."""
        self._fleet.barrier(timeout)
        mode_request = self._cluster.take_mode_request()
        if mode_request is not None:
            self._follow(*mode_request)

    def _follow(self, mode: str, settings: dict[str, int]) -> None:
        """Apply a mode request; refuse one that contradicts the strategy, on all workers alike."""
        try:
            consistency = Settings.from_parts(
                {"consistency": {"mode": mode, **settings}}
            ).consistency
            self.check(consistency)
        except ConfigError as error:
            _log.warning(f"the mode stays {self.consistency.mode!r}: {error}")
            return
        self.set_mode(consistency)

    def _release(self) -> None:
        if self._front is not None:
            self._front.release()

    def abandon(self) -> None:
        """Let go of every resource without a word to the fleet, as if this process had died."""
        self._cluster.abandon()
        self._release()

    def scale(self, servers: int) -> None:
        """Ask for another number of servers, from one of the next collectives on."""
        self._cluster.scale(servers)


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


def scale(runtime: Runtime, servers: int) -> None:
    """Ask for another number of servers, if the runtime is one of a cluster; embedded there are none.

    Raises:
        ConfigError: Nobody would start them.
        UsageError: The runtime only reads.
    """
    if isinstance(runtime, ModeSwitchRuntime):
        runtime.scale(servers)
    elif isinstance(runtime, ReadOnlyRuntime):
        runtime.refuse("ask for servers")


def check_mode(runtime: Runtime, mode: Mode, caller: str) -> None:
    """Refuse to join a runtime that is in another mode; embedded all modes are one.

    Raises:
        ConfigError: It is in another one.
    """
    present = getattr(runtime, "consistency", None)
    if present is not None and present.mode != mode:
        raise ConfigError(
            f"this process is in its fleet already, in mode {present.mode!r}, and {caller}() asks for "
            f"{mode!r}; name the same mode in both, or none in the second"
        )


def check_wire(runtime: Runtime, wire: WireSettings, caller: str) -> None:
    """Refuse to join a runtime whose values travel in another form.

    Raises:
        ConfigError: They do.
    """
    present = getattr(runtime, "wire", None)
    if present is not None and present != wire:
        raise ConfigError(
            f"this process is in its fleet already, with {present}, and {caller}() asks for {wire}; name the "
            "same in both, or none in the second"
        )


def _settled(cluster: ClusterLike, consistency: ConsistencySettings) -> ConsistencySettings:
    """Return the wanted mode, or the mode that the fleet has switched to in the meantime.

    Settings that servers do not know are then the usual ones until the script comes to the change that says
    them.
    """
    present = cluster.mode
    if consistency.declared.agreed() == present:
        return consistency
    return ConsistencySettings(cast(Mode, present.name), **present.agreed_settings)


def _front(cluster: ClusterLike, consistency: ConsistencySettings) -> ModeRuntime | None:
    """Return the mode's runtime in front of the cluster, or None if it has none."""
    if not consistency.declared.runtime:
        return None
    runtime: ModeRuntime = find_part(consistency.declared.runtime)(cluster, consistency)
    return runtime
