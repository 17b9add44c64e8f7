"""Some tables of a fleet get the weights of a checkpoint; the others stay as they are."""

from collections.abc import Iterable, Mapping

import numpy as np

from psfleet.checkpoint import Snapshot
from psfleet.checkpoint.table_content import content_of, known_tables
from psfleet.core.base.errors import CheckpointError
from psfleet.core.engine.interface import Runtime, TableState
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.graph.parameters.parameter_client import step_of


def warm_start(runtime: Runtime, path: str, tables: Iterable[str] | Mapping[str, str]) -> None:
    """Set the weights of some tables, and their optimizer state where it is of the same rule.

    Args:
        path: The folder of the checkpoint.
        tables: Names of the tables.

    Raises:
        CheckpointError: The checkpoint is damaged, or a table is missing or has another shape; nothing was
            changed.
    """
    snapshot = Snapshot(path)
    if not isinstance(tables, Mapping):
        tables = {name: name for name in ([tables] if isinstance(tables, str) else tables)}
    for own, source in [_pair(runtime, snapshot, path, *names) for names in tables.items()]:
        runtime.write_table(own.key, _state(runtime, snapshot, own, source))


def _pair(
    runtime: Runtime, snapshot: Snapshot, path: str, own: str, source: str
) -> tuple[TableSpec, TableSpec]:
    """The definitions of a table of the fleet and of the one of the checkpoint."""
    mine = {spec.name: spec for spec in runtime.specs().values()}.get(own)
    if mine is None:
        raise CheckpointError(
            f"{path!r} cannot be loaded into table {own!r}: the script has not made it"
        )
    [theirs] = known_tables(path, snapshot.specs(), [source])
    if (mine.kind, mine.shape) != (theirs.kind, theirs.shape):
        raise CheckpointError(
            f"table {source!r} of {path!r} is {theirs.kind} of shape {theirs.shape} and cannot be loaded "
            f"into table {own!r}, which is {mine.kind} of shape {mine.shape}"
        )
    return mine, theirs


def _state(runtime: Runtime, snapshot: Snapshot, own: TableSpec, source: TableSpec) -> TableState:
    content = content_of(snapshot, source)
    arrays, step = content.arrays, step_of(runtime, own.name)
    weights, slots = arrays["value"], own.rule.slots
    if own.rule.name == source.rule.name and all(slot.name in arrays for slot in slots):
        state, step = [arrays[slot.name] for slot in slots], max(step, content.step)
    else:
        state = [np.full_like(weights, slot.initial) for slot in slots]
    return TableState(step, [weights, *state], arrays.get("ids"))
