"""Servers that store a table (all, or a group of neighbours), and the ranges of a dense table on them.

A worker calls every server that stores something its step needs. So a small table is stored on as few servers
as its size allows. The definition of a table has its group: the first server and the number of servers. In a
fleet with fewer servers the group wraps round and contains each server once.

All functions here are pure: the servers of a table, and the ids or values of each server, follow from the
definition and the number of servers, so no process has to ask another.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.id_routing import VIRTUAL_SHARDS, owned_by, routes, virtual_shards
from psfleet.core.engine.schema.table import BLOCK, TableSpec

SHARE = 1 << 16
"""Dense values per server.

Pulling and pushing this many values costs as much CPU as one more call to a server.
"""


def servers_of(spec: TableSpec, servers: int) -> list[int]:
    """Return the servers that store the table, in the order in which they get its blocks or ids."""
    if spec.servers is None:
        return list(range(servers))
    return [(spec.first + position) % servers for position in range(group_size(spec, servers))]


def group_size(spec: TableSpec, servers: int) -> int:
    """Return the number of servers that store the table."""
    return servers if spec.servers is None else min(spec.servers, servers)


def owned_rows(
    spec: TableSpec, ids: NDArray[np.int64], server: int, servers: int
) -> NDArray[np.bool_]:
    """Return a mask of the ids whose rows are on `server`."""
    group = servers_of(spec, servers)
    if server not in group:
        return np.zeros(len(ids), np.bool_)
    return owned_by(ids, group.index(server), len(group))


def owners(spec: TableSpec, ids: NDArray[np.int64], servers: int) -> NDArray[np.int64]:
    """Return the server that stores the row of each id: int64 [n]."""
    group = servers_of(spec, servers)
    return np.array(group)[routes(len(group))][virtual_shards(ids)]


def located_as(there: TableSpec, spec: TableSpec) -> TableSpec:
    """Return the definition `spec`, but stored on the same group of servers as the table `there`."""
    return dataclasses.replace(spec, servers=there.servers, first=there.first)


def placed(spec: TableSpec, before: Iterable[TableSpec]) -> TableSpec:
    """Return the definition of a new table with its group of servers filled in.

    Dense tables fill one server after another, SHARE values each, so that a small model is on one server and
    a large model on all servers. The group of a sparse table begins after the groups of the sparse tables
    before it. A sparse table without a number of servers is on all servers.

    Args:
        spec: Definition of the table. Its `servers` is None if the script has not chosen a number.
        before: Definitions of the existing tables.
    """
    alike = [table for table in before if table.kind == spec.kind and table.name != spec.name]
    if spec.kind == "sparse":
        first = sum(table.servers or 0 for table in alike)
        return spec if spec.servers is None else dataclasses.replace(spec, first=first)
    count = spec.servers or min(max(-(-spec.size // SHARE), 1), VIRTUAL_SHARDS)
    first = sum(table.size for table in alike) // SHARE
    return dataclasses.replace(spec, servers=count, first=first)


def dense_range(spec: TableSpec, server: int, servers: int) -> tuple[int, int]:
    """Return the range of the flattened array that `server` stores, as first position and end (exclusive).

    The array is divided into blocks of BLOCK values, and the servers of the group get equal, contiguous runs
    of blocks. If all servers store the table, the table's key decides which server gets the first run, so
    that small tables spread over the servers. A table whose rule needs the whole array stays on one server.
    """
    first = spec.key if spec.servers is None else spec.first
    position = (server - first) % servers
    servers = group_size(spec, servers)
    if position >= servers:
        return spec.size, spec.size
    blocks = 1 if spec.rule.unit != "element" else -(-spec.size // BLOCK)
    length = spec.size if blocks <= 1 else BLOCK
    # Rounding up gives a single block to the first server of the group; rounding down, to the last.
    first = -(-blocks * position // servers)
    last = -(-blocks * (position + 1) // servers)
    return min(first * length, spec.size), min(last * length, spec.size)


def dense_ranges(spec: TableSpec, servers: int) -> list[tuple[int, int]]:
    """Return `dense_range` for every server, in the order of servers."""
    return [dense_range(spec, server, servers) for server in range(servers)]


def split_elements(positions: NDArray[np.int64], ranges: Sequence[tuple[int, int]]) -> list[slice]:
    """Return for each range the slice of `positions` within it; positions are ascending."""
    ends = np.searchsorted(positions, ranges)
    return [slice(int(low), int(high)) for low, high in ends]
