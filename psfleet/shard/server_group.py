"""Which servers hold a table: all of them, or a group of neighbours.

A worker calls each server that holds something of its step, so a table lies on as few as its size asks for.
The group is part of the table's definition: where it begins and how many servers it has. In a smaller fleet
it wraps round, and it has each server once.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.id_routing import VIRTUAL_SHARDS, owned_by
from psfleet.schema.table import TableSpec

__all__ = ["SHARE", "group_size", "located_as", "owned_rows", "placed", "servers_of"]

SHARE = 1 << 16
"""Dense values for which a server is worth a call: their bytes, pulled and pushed, cost as much CPU."""


def servers_of(spec: TableSpec, servers: int) -> list[int]:
    """The servers that hold the table, in the order in which its blocks or ids are dealt to them."""
    if spec.servers is None:
        return list(range(servers))
    return [(spec.first + place) % servers for place in range(group_size(spec, servers))]


def group_size(spec: TableSpec, servers: int) -> int:
    """How many of the servers hold the table."""
    return servers if spec.servers is None else min(spec.servers, servers)


def owned_rows(
    spec: TableSpec, ids: NDArray[np.int64], server: int, servers: int
) -> NDArray[np.bool_]:
    """Which of the ids have their rows on `server`."""
    group = servers_of(spec, servers)
    if server not in group:
        return np.zeros(len(ids), np.bool_)
    return owned_by(ids, group.index(server), len(group))


def located_as(there: TableSpec, spec: TableSpec) -> TableSpec:
    """The definition `spec` of a table that lies where `there` says."""
    return dataclasses.replace(spec, servers=there.servers, first=there.first)


def placed(spec: TableSpec, before: Iterable[TableSpec]) -> TableSpec:
    """The definition with a group, unless all servers are to hold the table.

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
    wanted = spec.servers or min(max(-(-spec.size // SHARE), 1), VIRTUAL_SHARDS)
    filled = sum(other.size for other in alike) // SHARE
    return dataclasses.replace(spec, servers=wanted, first=filled)
