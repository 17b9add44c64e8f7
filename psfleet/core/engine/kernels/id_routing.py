"""Routing of sparse ids to servers.

Ten bits of an id's hash are its virtual shard, 0 to 1023. Each server has a run of neighbouring virtual
shards, and the runs differ by at most one. Workers and servers compute this alone, from the number of
servers: there is no table of routes to agree on. A server's log does not say which number of servers it was
written with.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import numpy as np
from numba import int64, uint64
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.core.engine.kernels.intrinsics import helper

VIRTUAL_SHARDS = 1024
_FIRST_BIT = 40  # of the hash; no table uses these bits, see psfleet.core.engine.kernels.hashing

Ids = NDArray[np.int64]


@helper
def virtual_shard(hash_):
    """Return the virtual shard of an id with this hash."""
    return int64(hash_ >> uint64(_FIRST_BIT)) & (VIRTUAL_SHARDS - 1)


def routes(groups: int) -> NDArray[np.uint32]:
    """Return the group (server) of each virtual shard: uint32 [VIRTUAL_SHARDS], ascending."""
    if not 1 <= groups <= VIRTUAL_SHARDS:
        raise UsageError(f"there are {groups} servers; a fleet has 1 to {VIRTUAL_SHARDS}")
    return (np.arange(VIRTUAL_SHARDS) * groups // VIRTUAL_SHARDS).astype(np.uint32)


def largest_share(groups: int) -> float:
    """Return the expected fraction of all ids that the largest group has."""
    return float(np.bincount(routes(groups)).max()) / VIRTUAL_SHARDS


def virtual_shards(ids: Ids) -> NDArray[np.uint32]:
    """Return the virtual shard of each id: 10 bits of its hash that no table uses."""
    return (hash_ids(ids) >> np.uint64(_FIRST_BIT) & np.uint64(VIRTUAL_SHARDS - 1)).astype(
        np.uint32
    )


def owned_by(ids: Ids, group: int, groups: int) -> NDArray[np.bool_]:
    """Return a mask of the ids that `group` holds."""
    mask: NDArray[np.bool_] = routes(groups)[virtual_shards(ids)] == group
    return mask
