"""The weights of a snapshot in this process: they can be read, and nothing can change them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from psfleet.checkpoint import Snapshot
from psfleet.checkpoint.loading import Events
from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.errors import TableConflict, UsageError
from psfleet.rules.sgd import SGD
from psfleet.runtime.forwarding import ForwardingRuntime
from psfleet.runtime.interface import Gradient, TableState
from psfleet.schema.table import DecaySpec, TableSpec
from psfleet.shard.events import CreateTable

__all__ = ["FrozenRuntime"]

Floats = NDArray[np.float32]
Columns = Mapping[str, NDArray[Any]]


class FrozenRuntime(ForwardingRuntime):
    """Implements psfleet.runtime.interface.Runtime on the weights of a snapshot, without optimizer state.

    An id without a row has the first value that it would have in training.

    Args:
        path: The snapshot's folder.

    Raises:
        CheckpointError: It is missing, incomplete or damaged.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        tables = EmbeddedRuntime()
        tables.restore(_weights(Snapshot(path)))
        super().__init__(tables)

    @property
    def pools(self) -> bool:
        """See Runtime."""
        return self._fleet.pools

    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        """Find the table: what is declared of its optimizer and its first values does not count.

        Raises:
            UnknownTable: The snapshot has no such table.
            TableConflict: It has another kind or shape.
        """
        found = self.open(spec.name)
        if (found.kind, found.shape) != (spec.kind, spec.shape):
            raise TableConflict(
                f"table {spec.name!r} of {self._path!r} is {found.kind} of shape {found.shape}, and the "
                f"script declares it {spec.kind} of shape {spec.shape}"
            )
        return found.key

    def push(
        self, gradients: Sequence[Gradient], *, samples: int = 0, loss: float | None = None
    ) -> NoReturn:
        """Refused, as all that changes a table."""
        self._refuse("be pushed to")

    def write_table(self, table: int, state: TableState) -> NoReturn:
        """Refused."""
        self._refuse("be written to")

    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> NoReturn:
        """Refused."""
        self._refuse("be shrunk")

    def save(self, path: str, *, delta: bool = False, base: bool = False) -> NoReturn:
        """Refused: the optimizer state is not here."""
        self._refuse("be saved")

    def load(self, path: str) -> NoReturn:
        """Refused."""
        self._refuse("be loaded into")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"the tables of {self._path!r} can be read only, and cannot {what}; train on a fleet that has "
            "loaded it"
        )


def _weights(snapshot: Snapshot) -> Events:
    """What makes a shard hold the weights: no state, no scores, no ids that wait for a row."""
    widths = {spec.key: spec.dim for spec in snapshot.specs() if spec.kind == "sparse"}
    for event in snapshot.events(0, 1):
        if isinstance(event, CreateTable):
            yield CreateTable(_plain(event.spec), event.value)
        elif columns := _weight_columns(event.columns, widths.get(event.table, 0)):
            yield dataclasses.replace(event, columns=columns)


def _plain(spec: TableSpec) -> TableSpec:
    """The table without optimizer state and rows that go."""
    return dataclasses.replace(
        spec, rule=SGD(), decay=DecaySpec(), every_row=False, entry=None, device=None
    )


def _weight_columns(columns: Columns, width: int) -> Columns:
    if "value" in columns:
        return {"value": columns["value"]}
    if "ids" not in columns:
        return {}
    rows = np.ascontiguousarray(columns["rows"][:, :width])
    return {"ids": columns["ids"], "rows": rows, "touched": columns["touched"]}
