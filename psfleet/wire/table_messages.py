"""Between the definitions of psfleet and their protobuf messages."""

from typing import Any

from psfleet.errors import ConfigError, FrameError
from psfleet.rules import make_rule, reference_of
from psfleet.schema.entry import make_entry
from psfleet.schema.table import DecaySpec, InitializerSpec, TableSpec
from psfleet.settings.mode import Mode
from psfleet.wire.v1 import shard_pb2

__all__ = ["MAX_DENSE", "read_mode", "read_spec", "write_mode", "write_spec"]

MAX_DENSE = 2**40  # values of one dense table; a definition beyond it is damage, not ambition

_MODES: dict[Mode, shard_pb2.Mode] = {
    "sync": shard_pb2.MODE_SYNC,
    "async": shard_pb2.MODE_ASYNC,
    "ssp": shard_pb2.MODE_SSP,
    "geo": shard_pb2.MODE_GEO,
    "half-async": shard_pb2.MODE_HALF_ASYNC,
}


def write_mode(mode: Mode) -> shard_pb2.Mode:
    """The message's word for a mode."""
    if mode not in _MODES:
        raise ConfigError(f"mode is {mode!r}; it must be one of {', '.join(_MODES)}")
    return _MODES[mode]


def read_mode(mode: int) -> Mode:
    """The mode that a message names."""
    for name, number in _MODES.items():
        if number == mode:
            return name
    raise FrameError(f"mode {mode} is unknown; this server knows {_spoken()}")


def _spoken() -> str:
    return ", ".join(f"{name} ({number})" for name, number in _MODES.items())


def write_spec(spec: TableSpec) -> shard_pb2.TableSpec:
    """The message that defines a table."""
    return shard_pb2.TableSpec(
        name=spec.name,
        kind=spec.kind,
        shape=spec.shape,
        rule=reference_of(spec.rule),
        hyperparameters=spec.rule.hyperparameters(),
        l1=spec.decay.l1,
        l2=spec.decay.l2,
        initializer=spec.initializer.kind,
        low=spec.initializer.low,
        high=spec.initializer.high,
        seed=spec.seed,
        every_row=spec.every_row,
        entry=spec.entry.kind if spec.entry else "",
        entry_values=spec.entry.values() if spec.entry else {},
    )


def read_spec(message: shard_pb2.TableSpec) -> TableSpec:
    """The table that a message defines.

    Raises:
        UsageError: A value is outside what a definition allows; the text names it.
    """
    kind: Any = message.kind  # checked by TableSpec
    initializer: Any = message.initializer  # checked by Initializer
    spec = TableSpec(
        name=message.name,
        kind=kind,
        shape=tuple(message.shape),
        rule=make_rule(message.rule, dict(message.hyperparameters)),
        decay=DecaySpec(message.l1, message.l2),
        initializer=InitializerSpec(initializer, message.low, message.high),
        seed=message.seed,
        every_row=message.every_row,
        entry=make_entry(message.entry, dict(message.entry_values)),
    )
    if spec.size > MAX_DENSE:
        raise ConfigError(f"table {spec.name!r} has {spec.size} values, the limit is {MAX_DENSE}")
    return spec
