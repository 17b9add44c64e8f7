"""Cache of the last batches of each table with their distinct ids, for the push that follows a pull.

A training step pulls a batch and then pushes gradients for the same ids. Finding the distinct ids takes about
as long as looking up their rows, so the push reuses the result of the pull. The cache compares the ids and
not the array objects, because a script may build the array again for the push, or change it after the pull.
"""

from collections import deque
from collections.abc import Collection

from psfleet.core.engine.kernels.dedup import Ids, UniqueIds, dedup

_KEPT = 2  # batches of a table: the batch in training and the batch that is read ahead
# Only every 997th id of a long batch is compared first; these few ids distinguish most batches.
_SAMPLE = 997
_SHORT = 512  # up to this many ids, comparing the bytes of all ids is faster than comparing arrays

_Batch = tuple[Ids, bytes, UniqueIds]
"""Ids of a batch, the bytes of all or some of the ids, and the distinct ids."""


class RecentBatches:
    """Cache of the last batches of each table. One thread uses it; `newest` may be called by any thread."""

    def __init__(self) -> None:
        self._made: dict[int, deque[_Batch]] = {}  # by table, the newest batch first
        self._recent: dict[int, deque[_Batch]] = {}  # by number of servers, batches of any table

    def unique_ids(self, table: int, ids: Ids, groups: int) -> UniqueIds:
        """Return the distinct ids of a batch, sorted by server, from the cache if possible.

        Args:
            table: Number of the table.
            ids: Ids of the batch, int64 [n]. The cache copies the array if its owner could still change it.
            groups: Number of servers.
        """
        table_batches = self._made.get(table)
        if table_batches is None:
            table_batches = self._made[table] = deque(maxlen=_KEPT)
        # Comparing the object is enough: the cache has the caller's array itself only if the array cannot
        # change (`_kept`).
        if table_batches and table_batches[0][0] is ids:
            return table_batches[0][2]
        # A short batch is identified by the bytes of all its ids. For a long batch the bytes are a sample; if
        # the sample matches, all ids are compared.
        compared_bytes = ids.tobytes() if len(ids) <= _SHORT else ids[::_SAMPLE].tobytes()
        batch = _among(table_batches, ids, compared_bytes)
        if batch is None:
            # Tables of one model are often looked up with the same ids, one after the other.
            recent = self._recent.setdefault(groups, deque(maxlen=_KEPT))
            batch = _among(recent, ids, compared_bytes)
            if batch is None:
                batch = _kept(ids), compared_bytes, dedup(ids, groups)
                recent.appendleft(batch)
            table_batches.appendleft(batch)
        return batch[2]

    def newest(self) -> dict[int, Ids]:
        """Return the ids of each table's newest batch, by number of the table, for displays."""
        return {table: batches[0][0] for table, batches in [*self._made.items()] if batches}


def _kept(ids: Ids) -> Ids:
    """Return the array itself if it cannot change (it is read-only and no view), else a copy."""
    return ids if ids.base is None and not ids.flags.writeable else ids.copy()


def _among(batches: Collection[_Batch], ids: Ids, looked_at: bytes) -> _Batch | None:
    """Return the first of these batches with equal ids, or None."""
    count = len(ids)
    for batch in batches:
        batch_ids = batch[0]
        alike = batch[1] == looked_at and len(batch_ids) == count
        if alike and (batch_ids is ids or count <= _SHORT or (batch_ids == ids).all()):
            return batch
    return None
