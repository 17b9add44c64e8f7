"""A table of float64 sums to which every worker adds, exactly once with its pushes."""

import base64
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.hashing import owned_by
from psfleet.rules import make_rule
from psfleet.runtime.interface import Gradient, TableState
from psfleet.schema.table import InitializerSpec, TableSpec

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

_WIDTH = 32  # sums of a row
_SALT = 16  # bits of an id that only decide on which server its row lies


class SumTable:
    """Sums of one process that are not pushed, and their table.

    Two rows hold 32 sums: one their float32 values, the other what these leave out, which is empty for
    whole numbers below 2**24. Rows are float32 pairs themselves (rule `exact_sum`), so that a sum has 47
    bits or more. All rows lie on one server: a push counts whole or not at all, and a page of the table
    is one moment.

    Args:
        name: Name of the table.
        size: Number of sums.
        layout: Digest of what they mean; a table of that name with another one is refused.
        servers: Returns the number of servers of the fleet now; 0: none.

    Attributes:
        spec: The table's definition.
        pending: float64 [size]: what was added and has not left. Write under `lock`.
        lock: Held while `pending` changes.
    """

    def __init__(self, name: str, size: int, layout: int, servers: Callable[[], int]) -> None:
        rule, zero = make_rule("exact_sum", {}), InitializerSpec("constant", 0.0)
        self.spec = TableSpec(name, "sparse", (_WIDTH,), rule, initializer=zero, seed=layout)
        self.lock = threading.Lock()
        rows = -(-size // _WIDTH)
        self._rows = np.zeros((rows, _WIDTH))
        self.pending = self._rows.reshape(-1)[:size]
        self._servers = servers
        self._ids, self._dealt = np.zeros(2 * rows, np.int64), 0
        self._left: tuple[Ids, Floats] | None = None

    # -- a PushCounter -------------------------------------------------------------------------

    def leave(self) -> Gradient | None:
        """See PushCounter.leave."""
        with self.lock:
            self._give_back()
            rows = np.flatnonzero(self._rows.any(axis=1))
            if not len(rows):
                return None
            values = self._rows[rows]
            self._rows[rows] = 0
            self._left = rows, values
        return self._gradient(rows, values)

    def arrived(self) -> None:
        """See PushCounter.arrived."""
        with self.lock:
            self._left = None

    def _give_back(self) -> None:
        if self._left is not None:
            rows, values = self._left
            self._rows[rows] += values
            self._left = None

    def _gradient(self, rows: Ids, values: Floats) -> Gradient:
        large = values.astype(np.float32)
        small = (values - large).astype(np.float32)
        inexact = small.any(axis=1)
        if (servers := self._servers() or 1) != self._dealt:
            self._ids = _ids_on_one_server(len(self._ids), self.spec.key, servers)
            self._dealt = servers
        ids = np.concatenate([self._ids[2 * rows], self._ids[2 * rows[inexact] + 1]])
        return Gradient(self.spec.key, np.concatenate([large, small[inexact]]), ids, 1.0)

    # -- what all have pushed --------------------------------------------------------------------

    def totals(self, state: TableState) -> Floats:
        """The sums, float64 [size], in the whole table as it was read.

        Rows that an earlier fleet with another number of servers has left count too.
        """
        rows = np.zeros_like(self._rows)
        if state.ids is not None and len(state.ids):
            values = np.sum(state.values, axis=0, dtype=np.float64)
            np.add.at(rows, state.ids >> (_SALT + 1), values)
        return rows.reshape(-1)[: len(self.pending)]

    # -- what is not pushed ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the sums that no push has carried, as JSON can hold them."""
        with self.lock:
            places = np.flatnonzero(self.pending)
            values = self.pending[places]
        return {"places": _text(places), "sums": _text(values)}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """The opposite."""
        places = np.frombuffer(base64.b64decode(state["places"]), np.int64)
        with self.lock:
            self._left = None
            self.pending[:] = 0
            self.pending[places] = np.frombuffer(base64.b64decode(state["sums"]), np.float64)


def _text(values: NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _ids_on_one_server(count: int, key: int, servers: int) -> Ids:
    """Ids of rows 0, 1, 2, ... that lie on one server, which follows from the key."""
    ids, missing = np.zeros(count, np.int64), np.arange(count)
    for salt in range(1 << _SALT):
        candidates = missing << _SALT | salt
        mine = owned_by(candidates, key % servers, servers)
        ids[missing[mine]], missing = candidates[mine], missing[~mine]
        if not len(missing):
            break
    return ids
