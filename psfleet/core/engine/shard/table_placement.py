"""Servers that hold a table, all or a group of neighbours, and the partition of a dense table over them.

A worker calls each server that holds something of its step, so a table lies on as few as its size asks for.
The group is part of the table's definition: where it begins and how many servers it has. In a smaller fleet
it wraps round, and it has each server once.

Which servers hold a table, and what each of them owns, follows from the table and the number of servers, so
no process has to ask another.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.id_routing import VIRTUAL_SHARDS, owned_by, routes, virtual_shards
from psfleet.core.engine.schema.table import BLOCK, TableSpec

SHARE = 1 << 16
"""Dense values for which a server is worth a call: their bytes, pulled and pushed, cost as much CPU."""


def servers_of(spec: TableSpec, servers: int) -> list[int]:
    """The servers that hold the table, in the order in which its blocks or ids are dealt to them."""
    if spec.servers is None:
        return list(range(servers))
    return [(spec.first + place) % servers for place in range(group_size(spec, servers))]


def group_size(spec: TableSpec, servers: int) -> int:
    """Return the number of servers that hold the table."""
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
    """Return the server on which the row of each id is."""
    group = servers_of(spec, servers)
    return np.array(group)[routes(len(group))][virtual_shards(ids)]


def located_as(there: TableSpec, spec: TableSpec) -> TableSpec:
    """The definition `spec` of a table that lies where `there` says."""
    return dataclasses.replace(spec, servers=there.servers, first=there.first)


def placed(spec: TableSpec, before: Iterable[TableSpec]) -> TableSpec:
    """Return the definition with the group of servers that holds the table; without one all do.

    Dense tables fill one server after the other, SHARE values each, so that a small model is on one server
    and a large one on all. Groups of sparse tables follow each other.

    Args:
        spec: `servers` is None if the script has not said how many.
        before: The tables that are there already.
    """
    alike = [other for other in before if other.kind == spec.kind and other.name != spec.name]
    if spec.kind == "sparse":
        first = sum(other.servers or 0 for other in alike)
        return spec if spec.servers is None else dataclasses.replace(spec, first=first)
    count = spec.servers or min(max(-(-spec.size // SHARE), 1), VIRTUAL_SHARDS)
    first = sum(other.size for other in alike) // SHARE
    return dataclasses.replace(spec, servers=count, first=first)


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


def split_elements(positions: NDArray[np.int64], ranges: Sequence[tuple[int, int]]) -> list[slice]:
    """Split ascending positions of a flattened array by the ranges that they are in."""
    ends = np.searchsorted(positions, ranges)
    return [slice(int(low), int(high)) for low, high in ends]
