"""Warm start: sets the weights of some tables from a checkpoint, and leaves all other tables unchanged.

Used by `model_files.load(tables=...)` to train a new model from parts of an old one.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from psfleet.checkpoint import Snapshot
from psfleet.checkpoint.table_content import content_of, known_tables
from psfleet.core.base.errors import CheckpointError
from psfleet.core.engine.runtime_interface import Runtime, TableState
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.graph.parameters.parameter_client import step_of


def warm_start(runtime: Runtime, path: str, tables: Iterable[str] | Mapping[str, str]) -> None:
    """Set the weights of some tables from a checkpoint.

    Their optimizer state is set too, if the table in the checkpoint has the same update rule. Otherwise it
    starts fresh.

    Args:
        tables: Names of the tables, or a mapping from names in the fleet to names in the checkpoint.

    Raises:
        CheckpointError: The checkpoint is damaged, or a table is missing or has another shape. Nothing was
            changed.
    """
    snapshot = Snapshot(path)
    if not isinstance(tables, Mapping):
        tables = {name: name for name in ([tables] if isinstance(tables, str) else tables)}
    for target, source in [_pair(runtime, snapshot, path, *names) for names in tables.items()]:
        runtime.write_table(target.key, _state(runtime, snapshot, target, source))


def _pair(
    runtime: Runtime, snapshot: Snapshot, path: str, target: str, source: str
) -> tuple[TableSpec, TableSpec]:
    """Return the definition of a table in the fleet, and of its counterpart in the checkpoint."""
    table = {spec.name: spec for spec in runtime.specs().values()}.get(target)
    if table is None:
        raise CheckpointError(
            f"{path!r} cannot be loaded into table {target!r}: the script has not made it"
        )
    [saved] = known_tables(path, snapshot.specs(), [source])
    if (table.kind, table.shape) != (saved.kind, saved.shape):
        raise CheckpointError(
            f"table {source!r} of {path!r} is {saved.kind} of shape {saved.shape} and cannot be loaded "
            f"into table {target!r}, which is {table.kind} of shape {table.shape}"
        )
    return table, saved


def _state(
    runtime: Runtime, snapshot: Snapshot, target: TableSpec, source: TableSpec
) -> TableState:
    """Return the state to write, with the checkpoint's optimizer state if both rules are the same."""
    content = content_of(snapshot, source)
    arrays, step = content.arrays, step_of(runtime, target.name)
    weights, slots = arrays["value"], target.rule.slots
    if target.rule.name == source.rule.name and all(slot.name in arrays for slot in slots):
        state, step = [arrays[slot.name] for slot in slots], max(step, content.step)
    else:
        state = [np.full_like(weights, slot.initial) for slot in slots]
    return TableState(step, [weights, *state], arrays.get("ids"))
