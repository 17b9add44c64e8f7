"""Which part of a dense table lives on which server.

psfleet.shard.server_group says which servers hold a table, and what ids they own. Both deals are pure
functions of the table and the number of servers, so no process has to ask another.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.schema.table import BLOCK, TableSpec
from psfleet.shard.server_group import group_size

__all__ = ["deal_elements", "dense_range", "dense_ranges"]


def dense_range(spec: TableSpec, server: int, servers: int) -> tuple[int, int]:
    """The half-open range of the flattened array that `server` holds.

    The array is cut into blocks of BLOCK values which are dealt to the servers of the table's group in equal,
    contiguous runs. Where all servers hold a table, the first run goes to one chosen by the table's key. A
    table whose rule needs the whole array stays on one server.
    """
    first = spec.key if spec.servers is None else spec.first
    place = (server - first) % servers
    servers = group_size(spec, servers)
    if place >= servers:
        return spec.size, spec.size
    blocks = 1 if spec.rule.unit != "element" else -(-spec.size // BLOCK)
    length = spec.size if blocks <= 1 else BLOCK
    # Rounding up gives a lone block to place 0 rather than to the last one.
    first = -(-blocks * place // servers)
    last = -(-blocks * (place + 1) // servers)
    return min(first * length, spec.size), min(last * length, spec.size)


def dense_ranges(spec: TableSpec, servers: int) -> list[tuple[int, int]]:
    """`dense_range` of every server, in order of server."""
    return [dense_range(spec, server, servers) for server in range(servers)]


def deal_elements(positions: NDArray[np.int64], ranges: Sequence[tuple[int, int]]) -> list[slice]:
    """Which of the ascending positions in a flattened array lie in each range."""
    ends = np.searchsorted(positions, ranges)
    return [slice(int(low), int(high)) for low, high in ends]
