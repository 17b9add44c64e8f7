"""How many rows one server's part of a sparse table may have."""

import math
from typing import NamedTuple

from psfleet.kernels.id_routing import largest_share
from psfleet.schema.entry import CapacityEntry, part_of
from psfleet.schema.table import TableSpec
from psfleet.tables.row_memory import ROW_BYTES

__all__ = ["RowLimits"]

_DEVIATIONS = 6


class RowLimits(NamedTuple):
    """The limits of one server's part.

    The hash of an id decides on its server. Of n rows a server gets its share of the virtual shards on
    average, with a standard deviation below the root of that. So a table that is full on some number of
    servers has more than a server's part on some servers of another fleet: what is restored or written may
    exceed it.

    Attributes:
        pushed: Pushes add rows up to this number.
        held: Rows that are restored or written may be this many.
    """

    pushed: int
    held: int

    @classmethod
    def of(cls, spec: TableSpec, row_width: int, servers: int, most: int) -> "RowLimits":
        """Those of a table's entry.

        Args:
            row_width: float32 values of a row with its state.
            servers: How many servers the rows are dealt to.
            most: Rows of one server's part, whatever the entry says.
        """
        capacity = part_of(spec.entry, CapacityEntry)
        if capacity is None:
            return cls(most, most)
        row = 4 * row_width + ROW_BYTES
        limits = [capacity.rows, capacity.bytes // row if capacity.bytes else 0]
        limit = min([limit for limit in limits if limit], default=most * servers)
        pushed = max(-(-limit // servers), 1)
        largest = max(math.ceil(limit * largest_share(servers)), pushed)
        more = _DEVIATIONS * math.isqrt(largest) if servers > 1 else 0
        return cls(min(pushed, most), min(largest + more, most))
