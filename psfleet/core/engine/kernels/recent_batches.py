"""Cache of the last batches of each table with their distinct ids, so that a push need not compute them
again.

A training step pulls a batch and then pushes gradients for the same ids. Deduplication costs about as much as
the look-up of the rows, so the result of the pull is kept for the push.
"""

from collections import deque
from collections.abc import Collection

from psfleet.core.engine.kernels.dedup import Ids, UniqueIds, dedup

_KEPT = 2  # batches of a table: the batch in training and the one that is read ahead
_SAMPLE = 997  # distance of the ids that are compared first; these few tell most batches apart
_SHORT = 512  # a batch of this many ids or fewer is compared faster as bytes

_Batch = tuple[Ids, bytes, UniqueIds]
"""Ids of a batch, the bytes of all or some ids (`RecentBatches.of`), and the distinct ids."""


class RecentBatches:
    """Cache of the last batches of each table. Not thread-safe, except `newest`."""

    def __init__(self) -> None:
        self._made: dict[int, deque[_Batch]] = {}
        self._recent: dict[int, deque[_Batch]] = {}  # of any table, by groups

    def unique_ids(self, table: int, ids: Ids, groups: int) -> UniqueIds:
        """Return the distinct ids of a batch, sorted by server, from the cache if it is known.

        Args:
            table: Number of the table.
            ids: int64 [n]. An array that may be written to is copied for the cache.
            groups: Number of servers.
        """
        own = self._made.get(table)  # the last one first
        if own is None:
            own = self._made[table] = deque(maxlen=_KEPT)
        if own and own[0][0] is ids:
            return own[0][2]
        # A short batch is identified by all its bytes; of a long one a sample is compared before all ids are.
        looked_at = ids.tobytes() if len(ids) <= _SHORT else ids[::_SAMPLE].tobytes()
        batch = _among(own, ids, looked_at)
        if batch is None:
            # Tables of one model are often looked up with the same ids, one after the other.
            recent = self._recent.setdefault(groups, deque(maxlen=_KEPT))
            batch = _among(recent, ids, looked_at)
            if batch is None:
                batch = _kept(ids), looked_at, dedup(ids, groups)
                recent.appendleft(batch)
            own.appendleft(batch)
        return batch[2]

    def newest(self) -> dict[int, Ids]:
        """Return the ids of the newest batch of each table, for displays."""
        return {table: batches[0][0] for table, batches in [*self._made.items()] if batches}


def _kept(ids: Ids) -> Ids:
    """Return the array itself if it cannot change, else a copy."""
    return ids if ids.base is None and not ids.flags.writeable else ids.copy()


def _among(batches: Collection[_Batch], ids: Ids, looked_at: bytes) -> _Batch | None:
    """Return the cached batch with equal ids, or None."""
    count = len(ids)
    for one in batches:
        others = one[0]
        alike = one[1] == looked_at and len(others) == count
        if alike and (others is ids or count <= _SHORT or (others == ids).all()):
            return one
    return None
