"""A call of a known layout without arrays: what a server does by the places of its ids and values."""

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import PsfleetError
from psfleet.kernels.initial_values import address_of, floats_at
from psfleet.platform.memory import content_address
from psfleet.runtime.interface import Gradient
from psfleet.shard.shard_tables import ShardTables, Table
from psfleet.tables.dense import DenseTable
from psfleet.tables.row_update import PlacedRows
from psfleet.wire.segments import TensorRequest
from psfleet.wire.v1.frame_pb2 import Header, Outcome
from psfleet_server.rpc.pull_response import PullResponse, lay_out, placed

_MOST_IDS = 512  # of a table: others wait for Python's lock meanwhile
_LONGEST = 256 << 10  # bytes of values in a message, whose beginning is copied with room for them
_MOST_OPENINGS = 8
_Opening = tuple[bytes | bytearray, list[int], int]
"""What is sent, where the values of each read go, and how many bytes both are."""


@dataclass(slots=True)
class _TablePart:
    """One table's part of a call.

    Attributes:
        rows: Rows of a sparse table; None: it is dense.
        ids, count: Place and number of its ids.
        values, rate: Place of the values of a gradient, and its learning rate.
    """

    table: Table
    rows: PlacedRows | None = None
    ids: int = 0
    count: int = 0
    values: int = 0
    rate: float = 0.0


class CallPlan:
    """A call of a known layout. Places count from its payload; in shared memory they are addresses.

    Attributes:
        size: Bytes of its payload; 0: its tensors are in shared memory.
        gradient_bytes: Bytes of its gradients.
        pushes, pulls: True if it has gradients, and reads.
        version: Version of the tables for which it holds.
    """

    def __init__(
        self,
        tables: ShardTables,
        request: TensorRequest,
        room: PullResponse | None,
        payload: memoryview,
    ) -> None:
        """Plan calls like one whose tensors lie in this payload, or in shared memory that has this room.

        Raises:
            PsfleetError: The call is not in order.
            ValueError: Calls like it have no plan.
        """
        shapes = map(tables.shape_of, request.reads)
        if room is None and 4 * sum(map(math.prod, shapes)) > _LONGEST:
            raise ValueError("its response is long")
        self.size = len(payload) if room is None else 0
        self.gradient_bytes = request.gradient_bytes
        self.pushes, self.pulls = bool(request.gradients), bool(request.reads)
        self.version = tables.version
        self._tables, self._asked = tables, request.reads
        self._first = address_of(np.frombuffer(payload, np.uint8)) if room is None else 0
        self._updates = [self._update(one) for one in request.gradients]
        self._reads = [self._part(one.table, one.ids) for one in request.reads]
        self._outs = [] if room is None else [address_of(values) for values in room.values]
        # A worker's memory goes with the last array in it, and a worker may die during a call.
        self._lent = () if room is None else (*request.gradients, *room.values)
        self._bytes = 0 if room is None else room.size
        self._openings: dict[tuple[Outcome, int], _Opening] = {}

    def _place(self, array: NDArray[Any]) -> int:
        place = address_of(array) - self._first
        if self.size and not 0 <= place <= self.size - array.nbytes:
            raise ValueError("it is a copy")  # as of arrays that are not aligned
        return place

    def _part(self, key: int, ids: NDArray[np.int64] | None) -> _TablePart:
        table = self._tables[key]
        if isinstance(table, DenseTable):
            if ids is not None:
                raise ValueError("it has positions")
            return _TablePart(table)
        rows = None if ids is None or len(ids) > _MOST_IDS else table.placed()
        if ids is None or rows is None:
            raise ValueError("its table needs arrays")
        return _TablePart(table, rows, self._place(ids), len(ids))

    def _update(self, gradient: Gradient) -> _TablePart:
        self._tables.check_gradient(gradient)
        part = self._part(gradient.table, gradient.ids)
        part.values, part.rate = self._place(gradient.values), gradient.learning_rate
        return part

    def fit(self, base: int) -> bool:
        """See TableUpdates."""
        for part in self._updates:
            if part.rows is not None and not part.rows.fits(base + part.ids, part.count):
                return False
        return True

    def apply(self, base: int) -> None:
        """See TableUpdates."""
        for part in self._updates:
            values = base + part.values
            if part.rows is not None:
                part.rows.push(base + part.ids, part.count, values, part.rate)
            else:
                table = cast(DenseTable, part.table)
                table.push(floats_at(values, table.count), part.rate)

    def respond(self, base: int, outcome: Outcome, view: int) -> tuple[bytes, int]:
        """Read its tables; return the response, and how many bytes of values and message that is."""
        opening, outs, size = self._openings.get((outcome, view)) or self._open(outcome, view)
        message = bytes(opening)  # of a bytearray a new one
        place = content_address(message) if self.size else 0
        for part, out in zip(self._reads, outs, strict=True):
            if part.rows is not None:
                part.rows.pull(base + part.ids, part.count, place + out)
            else:
                table = cast(DenseTable, part.table)
                table.pull_into(floats_at(place + out, table.count))
        return message, size

    def _open(self, outcome: Outcome, view: int) -> _Opening:
        """Lay out a response."""
        if self.size:
            header = Header(outcome=outcome, view=view)
            response = lay_out(header, self._asked, self._tables.shape_of)
            first = content_address(response.message)
            outs = [address_of(values) - first for values in response.values]
            opening: _Opening = bytearray(response.message), outs, response.size
        else:
            message = placed(outcome, view)
            opening = message, self._outs, self._bytes + len(message)
        if len(self._openings) >= _MOST_OPENINGS:
            self._openings.clear()
        self._openings[outcome, view] = opening
        return opening


def plan_of(
    tables: ShardTables, request: TensorRequest, room: PullResponse | None, payload: memoryview
) -> CallPlan | None:
    """Return the plan of calls like this one; None: they have none."""
    try:
        return CallPlan(tables, request, room, payload)
    except (PsfleetError, ValueError):
        return None
