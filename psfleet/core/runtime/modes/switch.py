"""Runtime of a cluster in the strategy's consistency mode, and the switch to another mode during training.

A mode may wrap the cluster's runtime in a runtime of its own (`geo.py`, `half_async.py`). Scripts use
`ModeSwitchRuntime`, which stays the same object when a mode switch replaces that wrapper.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

from typing_extensions import override

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.logs import log_of
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.consistency import find_part
from psfleet.core.engine.runtime_interface import Runtime, load_runtime
from psfleet.core.runtime.runtime_bases import ForwardingRuntime, handed_on, read_through
from psfleet.core.runtime.script_runtime import ClusterLike, ScriptRuntime
from psfleet.core.runtime.strategy import ConsistencySettings, Settings, WireSettings

_log = log_of(__name__)


def connect(
    environment: Environment, consistency: ConsistencySettings, wire: WireSettings | None = None
) -> "ModeSwitchRuntime":
    """Connect to the cluster that the environment names, in this consistency mode."""
    cluster: ClusterLike = load_runtime("cluster", environment, consistency.declared, wire=wire)
    return ModeSwitchRuntime(cluster, consistency)


class ModeRuntime(ScriptRuntime, Protocol):
    """Runtime in which a mode wraps the cluster's runtime; `ConsistencyMode.runtime` names its class."""

    def release(self) -> None:
        """Release everything except the cluster's runtime, which continues in another mode."""


class ModeSwitchRuntime(ForwardingRuntime):
    """Runtime of a script in a cluster, which stays the same object when the consistency mode changes.

    Attributes:
        consistency: Present mode of the fleet. It differs from the requested mode in a process that joins
            after a mode switch.
        check: Function that is called before each switch and raises ConfigError if a mode contradicts the
            rest of the strategy.
    """

    pools: bool = read_through("_fleet.pools")
    reads_ahead: bool = read_through("_fleet.reads_ahead")
    pull_ahead = handed_on(Runtime.pull_ahead)

    def __init__(self, cluster: ClusterLike, consistency: ConsistencySettings) -> None:
        super().__init__(cluster)
        self._cluster = cluster
        self.consistency = _settled(cluster, consistency)
        self.check: Callable[[ConsistencySettings], Any] = lambda settings: None
        self._enter()

    def _enter(self) -> None:
        """Wrap the cluster's runtime in that of the present mode, if the mode has one."""
        self._front = _front(self._cluster, self.consistency)
        self._fleet = self._cluster if self._front is None else self._front

    @override
    def set_mode(self, consistency: ConsistencySettings) -> None:
        self.check(consistency)
        # Flush through the present mode's runtime first: its queue and unsent deltas belong to the old mode.
        # Release it only after the switch, which the coordinator may refuse.
        self._fleet.flush()
        self._cluster.set_mode(consistency)
        self._release()
        self.consistency = _settled(self._cluster, consistency)
        self._enter()

    def barrier(self, timeout: float | None = None) -> None:
        """Wait for all workers, then switch the mode if `psfleet mode` has requested it."""
        self._fleet.barrier(timeout)
        mode_request = self._cluster.take_mode_request()
        if mode_request is not None:
            self._follow(*mode_request)

    def _follow(self, mode: str, settings: dict[str, int]) -> None:
        """Switch to a mode that `psfleet mode` requests, or log a warning if it contradicts the strategy.

        All workers have the same strategy, so either all workers switch or none does.
        """
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
        """Release every resource without notifying the fleet, as if this process had died."""
        self._cluster.abandon()
        self._release()


def check_mode(runtime: ScriptRuntime, mode: Mode, caller: str) -> None:
    """Raise an error if a cluster's runtime is in another mode. An embedded runtime has no mode.

    Args:
        caller: Name of the calling function, for the message.

    Raises:
        ConfigError: The runtime is in another mode.
    """
    cluster = runtime.cluster
    if cluster is not None and cluster.mode.name != mode:
        raise ConfigError(
            f"this process is in its fleet already, in mode {cluster.mode.name!r}, and {caller}() asks for "
            f"{mode!r}; name the same mode in both, or none in the second"
        )


def check_wire(runtime: ScriptRuntime, wire: WireSettings, caller: str) -> None:
    """Raise an error if a runtime uses other compression for transfers than the caller requests.

    Args:
        caller: Name of the calling function, for the message.

    Raises:
        ConfigError: The runtime has other settings.
    """
    if runtime.wire != wire:
        raise ConfigError(
            f"this process is in its fleet already, with {runtime.wire}, and {caller}() asks for {wire}; "
            "name the same in both, or none in the second"
        )


def _settled(cluster: ClusterLike, consistency: ConsistencySettings) -> ConsistencySettings:
    """Return the fleet's mode: the requested mode, unless the fleet has switched to another in the meantime.

    A worker that restarts after a mode switch finds the fleet in the new mode. The servers know only some of
    its settings; other settings have their defaults until the script reaches its own `set_mode` call.
    """
    present = cluster.mode
    if consistency.declared.agreed() == present:
        return consistency
    return ConsistencySettings(cast(Mode, present.name), **present.agreed_settings)


def _front(cluster: ClusterLike, consistency: ConsistencySettings) -> ModeRuntime | None:
    """Return the mode's runtime, which wraps the cluster's runtime, or None if the mode has none."""
    if not consistency.declared.runtime:
        return None
    runtime: ModeRuntime = find_part(consistency.declared.runtime)(cluster, consistency)
    return runtime
