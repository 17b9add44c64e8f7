"""Saves a fleet's tables as a checkpoint and loads them, for `psfleet.fleet` and `psfleet.connect()`.

The Runtime writes and reads the files. This module checks beforehand for likely mistakes of users: an empty
fleet, gradients that `gradient_merge` has not pushed yet, a folder of another model. After a load it drops
all cached values.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from psfleet.core.base.errors import CheckpointError, ConfigError, UsageError
from psfleet.core.engine.runtime_interface import Runtime
from psfleet.core.graph.parameters.binding import invalidate
from psfleet.core.graph.parameters.parameter import living_names
from psfleet.core.runtime.process_runtime import check_none_waits, current

TableNames = Iterable[str] | Mapping[str, str]
"""Names of tables to load, or a mapping from names in the fleet to names in the checkpoint."""

_NAMED = 5  # tables that a message names
_loads = 0


def folder_of(path: Any, caller: str) -> str:
    """Return the path of a folder as a text.

    Raises:
        UsageError: The argument is not a path. The message names `caller`, the function that got it.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"{caller} needs the path of a folder; it got {path!r}")
    return os.fspath(path)


def save(
    runtime: Runtime, path: str, *, delta: bool = False, base: bool = False, resumes: bool = True
) -> None:
    """Write every table of the fleet to a folder.

    Args:
        runtime: Runtime that has the tables.
        path: Folder to write.
        delta: True to write only the changes since the last base or delta.
        base: True to let later deltas refer to this snapshot.
        resumes: True if training may continue from the folder. Gradients that wait for a merge are then an
            error, because the folder would lack them.

    Raises:
        ConfigError: The path is empty.
        CheckpointError: The fleet has no table yet, or the folder cannot be written.
        UsageError: gradient_merge has gradients that are not pushed yet, so the folder would lack them.
    """
    if not path:
        raise ConfigError("the folder to save into is ''; name one")
    if resumes:
        check_none_waits(current().waiting_steps, f"the folder {path!r}")
    runtime.flush()
    if not any(server["tables"] for server in runtime.stats()):
        raise CheckpointError(
            f"there is nothing to save into {path!r}: the fleet has no table yet; make one, or train a "
            "step, before saving"
        )
    runtime.save(path, delta=delta, base=base)


def load(runtime: Runtime, path: str, tables: TableNames | None = None) -> None:
    """Set tables from a checkpoint. Every worker must call this: worker 0 loads, and all wait for it.

    Args:
        runtime: Runtime that has the tables.
        path: Folder of the checkpoint.
        tables: Names of the tables that get weights, or a mapping from these names to names in the
            checkpoint. None sets every table of the checkpoint, with its definition.

    Raises:
        CheckpointError: The folder is missing or damaged, it has values for none of the script's tables and
            parameters, or it lacks a table that `tables` names. Nothing was changed.
    """
    global _loads
    runtime.barrier()
    if runtime.worker_index == 0 and not runtime.passes:
        if tables is None:
            _check_useful(path, {spec.name for spec in runtime.specs().values()} | living_names())
            runtime.load(path)
        else:
            from psfleet.core.graph.execution.warm_start import (
                warm_start,  # loads the tables of servers
            )

            warm_start(runtime, path, tables)
    runtime.barrier()
    for merger in current().mergers:
        merger.drop_waiting()
    _loads += 1
    invalidate()


def has_loaded() -> bool:
    """Return whether this process has loaded a checkpoint."""
    return _loads > 0


def _check_useful(path: str, names: Collection[str]) -> None:
    """Raise an error if the checkpoint and the script have no table name in common."""
    from psfleet.checkpoint import read_specs  # loads the tables of servers

    tables = {spec.name for spec in read_specs(path)}
    if not tables.isdisjoint(names):
        return
    raise CheckpointError(
        f"{path!r} has {_listed(tables)} and the script {_listed(names)}: none of them would get a "
        "value; load after the model or its tables are made, from a checkpoint of the same names"
    )


def _listed(names: Collection[str]) -> str:
    if not names:
        return "no table"
    text = ", ".join(sorted(names)[:_NAMED])
    remainder = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{'table' if len(names) == 1 else 'tables'} {text}{remainder}"
