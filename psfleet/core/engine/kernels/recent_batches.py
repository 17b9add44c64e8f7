"""The last batches of a table with their distinct ids, so that a push need not look for them again.

A training step pulls a batch and then pushes gradients for the same ids. Making ids distinct costs about as
much as the look-up, so what the pull has found is kept for the push.
"""

from collections import deque
from collections.abc import Collection

from psfleet.core.engine.kernels.dedup import Ids, UniqueIds, dedup

_KEPT = 2  # batches of a table: the one that is trained and the one that is read ahead
_SAMPLE = 997  # a look at every so many ids tells most batches apart
_SHORT = 512  # ids of a batch that is compared faster as bytes

_Batch = tuple[Ids, bytes, UniqueIds]
"""Ids, bytes of all of them or of some (`RecentBatches.of`), and what was made of them."""


class RecentBatches:
    """The last batches of each table."""

    def __init__(self) -> None:
        self._made: dict[int, deque[_Batch]] = {}
        self._recent: dict[int, deque[_Batch]] = {}  # of any table, by groups

    def of(self, table: int, ids: Ids, groups: int) -> UniqueIds:
        """Return the distinct ids [n] of a batch of a table, dealt to so many servers."""
        own = self._made.get(table)  # the last one first
        if own is None:
            own = self._made[table] = deque(maxlen=_KEPT)
        if own and own[0][0] is ids:
            return own[0][2]
        # The bytes of the ids; of many, those of some.
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
        """Return the newest batch of each table. Another thread may ask, for displays."""
        return {table: batches[0][0] for table, batches in [*self._made.items()] if batches}


def _kept(ids: Ids) -> Ids:
    """Return the array itself if it cannot change, else a copy."""
    return ids if ids.base is None and not ids.flags.writeable else ids.copy()


def _among(batches: Collection[_Batch], ids: Ids, looked_at: bytes) -> _Batch | None:
    """Return the batch of these very ids."""
    count = len(ids)
    for one in batches:
        others = one[0]
        alike = one[1] == looked_at and len(others) == count
        if alike and (others is ids or count <= _SHORT or (others == ids).all()):
            return one
    return None
