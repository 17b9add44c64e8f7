"""The weights of a snapshot in this process: they can be read, and nothing can change them."""

import dataclasses
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint import Snapshot
from psfleet.checkpoint.loading import Events
from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.rules.momentum import SGD
from psfleet.runtime.interface import Runtime
from psfleet.runtime.runtime_bases import ForwardingRuntime, ReadOnlyRuntime, handed_on
from psfleet.schema.table import DecaySpec, TableSpec
from psfleet.shard.events import CreateTable
from psfleet.tables.row_data import ROW_IDS, RowData, row_columns, rows_of

Floats = NDArray[np.float32]
Columns = Mapping[str, NDArray[Any]]


class FrozenRuntime(ReadOnlyRuntime, ForwardingRuntime):
    """Implements psfleet.runtime.interface.Runtime on the weights of a snapshot, without optimizer state.

    An id without a row has the first value that it would have in training.

    Args:
        path: The snapshot's folder.

    Raises:
        CheckpointError: It is missing, incomplete or damaged.
    """

    open = handed_on(Runtime.open)
    pools = property(attrgetter("_fleet.pools"))

    def __init__(self, path: str) -> None:
        self.source = repr(path)
        self.instead = "train on a fleet that has loaded it"
        tables = EmbeddedRuntime(only_reads=True)
        tables.restore(_weights(Snapshot(path)))
        super().__init__(tables)


def _weights(snapshot: Snapshot) -> Events:
    """Yield the events that load the weights into a shard: no state, no scores, no candidate ids."""
    specs = {spec.key: spec for spec in snapshot.specs()}
    for event in snapshot.events(0, 1):
        if isinstance(event, CreateTable):
            yield CreateTable(_plain(event.spec), event.value)
        elif columns := _weight_columns(specs[event.table], event.columns):
            yield dataclasses.replace(event, columns=columns)


def _plain(spec: TableSpec) -> TableSpec:
    """Return the table without optimizer state and rows that go."""
    return dataclasses.replace(
        spec, rule=SGD(), decay=DecaySpec(), every_row=False, entry=None, device=None
    )


def _weight_columns(spec: TableSpec, columns: Columns) -> Columns:
    if spec.kind == "dense":
        name = spec.slot_names[0]
        return {name: columns[name]}
    if ROW_IDS not in columns:
        return {}
    rows = rows_of(spec, columns)
    weights = np.ascontiguousarray(rows.values[:, : spec.dim])
    return row_columns(RowData(rows.ids, weights, rows.touched, rows.scores[:, :0]))
