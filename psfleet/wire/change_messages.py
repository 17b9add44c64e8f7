"""Changes of tables on their way to a follower."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import FrameError
from psfleet.schema.table import TableSpec
from psfleet.wire.body import parse
from psfleet.wire.table_messages import read_spec, write_spec
from psfleet.wire.v1 import follower_pb2

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

NO_IDS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class ChangedTable:
    """Change of one table on one server.

    Attributes:
        spec: Definition of the table.
        ids: int64 [n]; of a dense table [0].
        weights: float32 [n, dim]; of a dense table the server's slice.
        removed: int64 [m].
        whole: It has no other rows.
    """

    spec: TableSpec
    ids: Ids
    weights: Floats
    removed: Ids = field(default_factory=NO_IDS.copy)
    whole: bool = False

    def write(self, message: follower_pb2.TableChanges) -> None:
        """Fill an empty message."""
        message.table, message.whole = self.spec.key, self.whole
        if self.whole:
            message.spec.CopyFrom(write_spec(self.spec))
        write_rows(message, self.ids, self.weights)
        message.removed = self.removed.astype("<i8", copy=False).tobytes()


def write_rows(
    message: "follower_pb2.TableChanges | follower_pb2.RowsReply", ids: Ids, weights: Floats
) -> None:
    """Set the ids and weights of a message."""
    message.ids = ids.astype("<i8", copy=False).tobytes()
    message.weights = weights.astype("<f4", copy=False).tobytes()


def read_changes(
    message: follower_pb2.ChangesReply, specs: dict[int, TableSpec]
) -> list[ChangedTable]:
    """Return the changes in a reply; `specs` gets the definitions that come with them.

    Raises:
        FrameError: They do not fit together.
    """
    changes = []
    for each in message.tables:
        if each.whole:
            specs[each.table] = read_spec(each.spec)
        if each.table not in specs:
            raise FrameError(f"changes of table {each.table:#x} come without its definition")
        spec = specs[each.table]
        ids, weights = read_rows(each, spec)
        removals = _array(each.removed, np.int64)
        changes.append(ChangedTable(spec, ids, weights, removals, each.whole))
    return changes


def read_rows(
    message: "follower_pb2.TableChanges | follower_pb2.RowsReply", spec: TableSpec
) -> tuple[Ids, Floats]:
    """Return the ids and weights of a message."""
    ids, weights = _array(message.ids, np.int64), _array(message.weights, np.float32)
    if spec.kind == "dense":
        return ids, weights
    if len(weights) != len(ids) * spec.dim:
        raise FrameError(
            f"{len(ids)} rows of table {spec.name!r} come with {len(weights)} weights; a row has {spec.dim}"
        )
    return ids, weights.reshape(-1, spec.dim)


def read_reply(message: bytes) -> follower_pb2.ChangesReply:
    """Return the reply to a request for changes."""
    return parse(follower_pb2.ChangesReply, message)


def _array(content: bytes, dtype: "type[np.int64 | np.float32]") -> NDArray[Any]:
    size = np.dtype(dtype).itemsize
    if len(content) % size:
        raise FrameError(f"{len(content)} bytes are no whole number of {np.dtype(dtype).name}")
    return np.frombuffer(content, np.dtype(dtype).newbyteorder("<")).astype(dtype, copy=False)
