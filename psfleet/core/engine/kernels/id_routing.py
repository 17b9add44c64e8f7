"""Assigns sparse ids to servers by hash, so that no table of routes has to be agreed on.

Ten bits of an id's hash are its *virtual shard*, 0 to 1023. Each server owns a range of consecutive virtual
shards; the sizes of the ranges differ by at most one. With 3 servers:

    virtual shard   0 ... 341 | 342 ... 682 | 683 ... 1023
    server          0         | 1           | 2

Workers and servers compute the range from the number of servers alone. A server's log does not record the
number of servers that it was written with.

Functions take `groups`, the number of servers, and `group`, the number of one server.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import numpy as np
from numba import int64, uint64
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.core.engine.kernels.intrinsics import helper

VIRTUAL_SHARDS = 1024
_FIRST_BIT = 40  # of the hash; tables use other bits, see psfleet.core.engine.kernels.hashing

Ids = NDArray[np.int64]


@helper
def virtual_shard(hash_):
    """Return the virtual shard (one of 1,024 classes of ids) of an id with this hash."""
    return int64(hash_ >> uint64(_FIRST_BIT)) & (VIRTUAL_SHARDS - 1)


def routes(groups: int) -> NDArray[np.uint32]:
    """Return the server of each virtual shard (class of ids by hash): uint32 [VIRTUAL_SHARDS], ascending."""
    if not 1 <= groups <= VIRTUAL_SHARDS:
        raise UsageError(f"there are {groups} servers; a fleet has 1 to {VIRTUAL_SHARDS}")
    return (np.arange(VIRTUAL_SHARDS) * groups // VIRTUAL_SHARDS).astype(np.uint32)


def largest_share(groups: int) -> float:
    """Return the expected fraction of all ids that belongs to the server with the most classes of ids."""
    return float(np.bincount(routes(groups)).max()) / VIRTUAL_SHARDS


def virtual_shards(ids: Ids) -> NDArray[np.uint32]:
    """Return the virtual shard of each id: a number from 0 to 1023 that decides the id's server."""
    return (hash_ids(ids) >> np.uint64(_FIRST_BIT) & np.uint64(VIRTUAL_SHARDS - 1)).astype(
        np.uint32
    )


def owned_by(ids: Ids, group: int, groups: int) -> NDArray[np.bool_]:
    """Return a mask of the ids that belong to server `group` of `groups`."""
    mask: NDArray[np.bool_] = routes(groups)[virtual_shards(ids)] == group
    return mask
