"""The reference's a_sync and a_sync_configs in terms of psfleet's consistency modes."""

from collections.abc import Mapping
from typing import Any

from psfleet.errors import ConfigError

__all__ = ["consistency_of"]

_KNOWN = ("k_steps", "max_merge_var_num", "send_queue_size", "staleness")
_LATE = ("staleness_damping", "delay_compensation")
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
    late = {name: value for name, value in configs.items() if name in _LATE}
    return {**_mode_of(a_sync, configs), **late}


def _mode_of(a_sync: bool, configs: Mapping[str, Any]) -> dict[str, Any]:
    """The mode and its own settings."""
    for name, value in configs.items():
        if name in _ELSEWHERE:
            raise ConfigError(f"a_sync_configs {name} has no meaning here: {_ELSEWHERE[name]}")
        if name not in (*_KNOWN, *_LATE):
            known = ", ".join((*_KNOWN, *_LATE))
            raise ConfigError(f"a_sync_configs has no setting {name!r}; it has {known}")
        if name in _LATE:
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ConfigError(f"a_sync_configs {name} is {value!r}; it must be a number")
        elif not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"a_sync_configs {name} is {value!r}; it must be a whole number")
    steps, merge = configs.get("k_steps", 0), configs.get("max_merge_var_num", 1)
    if steps < -1:
        raise ConfigError(
            f"a_sync_configs k_steps is {steps}; it must be 0 (async), above 0 (geo) or -1 (sync)"
        )
    asked = [
        *(["k_steps"] if steps > 0 else []),
        *(["max_merge_var_num"] if merge != 1 else []),
        *(["staleness"] if "staleness" in configs else []),
    ]
    if len(asked) > 1:
        raise ConfigError(
            f"a_sync_configs {asked[0]} and {asked[1]} contradict each other: each asks for a "
            "mode of its own; leave one out"
        )
    if "send_queue_size" in configs and asked != ["max_merge_var_num"]:
        raise ConfigError(
            f"a_sync_configs send_queue_size is {configs['send_queue_size']} and max_merge_var_num "
            "is 1: the queue is of gradients to merge; leave it out or merge more than 1"
        )
    if not a_sync or steps == -1:
        if asked:
            raise ConfigError(
                f"a_sync_configs {asked[0]} = {configs[asked[0]]} asks for a mode that is not sync, "
                "but a_sync is False or k_steps -1; set a_sync or leave it out"
            )
        return {"mode": "sync"}
    if not asked:
        return {"mode": "async"}
    if asked == ["k_steps"]:
        return {"mode": "geo", "k_steps": steps}
    if asked == ["staleness"]:
        return {"mode": "ssp", "staleness": configs["staleness"]}
    queue = {"queue_size": configs["send_queue_size"]} if "send_queue_size" in configs else {}
    return {"mode": "half-async", "max_merge": merge, **queue}
