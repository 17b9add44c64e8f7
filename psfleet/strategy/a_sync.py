"""The reference's a_sync and a_sync_configs in terms of psfleet's consistency modes."""

from collections.abc import Mapping
from typing import Any

from psfleet.consistency import MODES, ConsistencyMode, LatePushMode
from psfleet.errors import ConfigError
from psfleet.settings.declaration import settings_of

__all__ = ["consistency_of"]

_OF_THREADS = "psfleet sends without the reference's thread pools; leave it out"
_ELSEWHERE = {
    "independent_recv_thread": "a pull is answered when it is asked for; leave it out",
    "launch_barrier": "workers wait for servers and for each other by themselves; leave it out",
    "lr_decay_steps": "the learning rate is the worker's and travels with each push; leave it out",
    "min_send_grad_num_before_recv": _OF_THREADS,
    "runtime_split_send_recv": _OF_THREADS,
    "send_wait_times": _OF_THREADS,
    "thread_pool_size": _OF_THREADS,
}


def consistency_of(a_sync: bool, configs: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the part `consistency`, see DistributedStrategy.

    Raises:
        ConfigError: A setting is unknown, of the wrong type or contradicts another.
    """
    late = [one.name for one in settings_of(LatePushMode)]
    _check(configs, late)
    shared = {name: value for name, value in configs.items() if name in late}
    mode = _asked(configs)
    if not a_sync or configs.get("k_steps") == -1:
        if mode is not None:
            name = next(iter(mode.a_sync))
            raise ConfigError(
                f"a_sync_configs {name} = {configs[name]} asks for a mode that is not sync, "
                "but a_sync is False or k_steps -1; set a_sync or leave it out"
            )
        return {"mode": "sync", **shared}
    if mode is None:
        return {"mode": "async", **shared}
    own = {mode.a_sync[name]: value for name, value in configs.items() if name in mode.a_sync}
    return {"mode": mode.name, **own, **shared}


def _check(configs: Mapping[str, Any], late: list[str]) -> None:
    """Refuse names and types that no mode takes."""
    known = sorted(name for mode in MODES.values() for name in mode.a_sync) + late
    for name, value in configs.items():
        if name in _ELSEWHERE:
            raise ConfigError(f"a_sync_configs {name} has no meaning here: {_ELSEWHERE[name]}")
        if name not in known:
            raise ConfigError(f"a_sync_configs has no setting {name!r}; it has {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, (int, float) if name in late else int):
            wanted = "number" if name in late else "whole number"
            raise ConfigError(f"a_sync_configs {name} is {value!r}; it must be a {wanted}")
    if configs.get("k_steps", 0) < -1:
        raise ConfigError(
            f"a_sync_configs k_steps is {configs['k_steps']}; it must be 0 (async), above 0 (geo) or -1 "
            "(sync)"
        )


def _asked(configs: Mapping[str, Any]) -> ConsistencyMode | None:
    """The one mode that the configuration asks for; None: none."""
    found: dict[str, ConsistencyMode] = {}
    for mode in MODES.values():
        first, *others = mode.a_sync or [""]
        if first in configs and configs[first] not in mode.a_sync_off:
            found[first] = mode
            continue
        usual = next(iter(mode.a_sync_off), "not given")
        for name in filter(configs.__contains__, others):
            raise ConfigError(
                f"a_sync_configs {name} is {configs[name]} and {first} is {usual}: it is a "
                f"setting of {mode.name}, which {first} asks for; leave it out or set {first} too"
            )
    if len(found) > 1:
        names = [name for name in configs if name in found]
        raise ConfigError(
            f"a_sync_configs {names[0]} and {names[1]} contradict each other: each asks for a "
            "mode of its own; leave one out"
        )
    return next(iter(found.values()), None)
