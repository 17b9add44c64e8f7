"""Whole checkpoints of one worker's fleet, for `psfleet.fleet` and the clients of `psfleet.connect()`."""

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from psfleet.core.base.errors import CheckpointError, ConfigError, UsageError
from psfleet.core.engine.interface import Runtime
from psfleet.core.graph.parameters.binding import invalidate
from psfleet.core.graph.parameters.parameter import living_names
from psfleet.core.runtime.process_runtime import check_none_waits, current

TableNames = Iterable[str] | Mapping[str, str]
"""Names of tables, or by name the one of the checkpoint whose weights it gets."""

_NAMED = 5  # tables in a message
_loads = 0


def folder_of(path: Any, caller: str) -> str:
    """The path of a folder as a text.

    Raises:
        UsageError: It is something else.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"{caller} needs the path of a folder; it got {path!r}")
    return os.fspath(path)


def save(
    runtime: Runtime, path: str, *, delta: bool = False, base: bool = False, resumes: bool = True
) -> None:
    """Write every table of the fleet; see Runtime.save. `resumes`: training may go on from it.

    Raises:
        ConfigError: The path is empty.
        CheckpointError: The fleet has no table yet, or the folder cannot be written.
        UsageError: gradient_merge keeps gradients, which the folder would lack.
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
    """Set tables from a folder, by worker 0 while the others wait; every worker must come here.

    Args:
        path: The folder.
        tables: Those that get weights, each from the one of its name or from the one that is given; None:
            every table is set, and has the definition of the folder.

    Raises:
        CheckpointError: The folder is missing or damaged, or no table or parameter of the script would
            get a value from it, or one of `tables` cannot; nothing was changed.
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
    """Refuse a folder from which nothing of the script would get a value."""
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
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{'table' if len(names) == 1 else 'tables'} {text}{more}"
