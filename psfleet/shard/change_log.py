"""The last changes of a shard's tables, for followers: which rows, and not what has become of them."""

from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.dedup import dedup

Ids = NDArray[np.int64]

_MOST = 4 << 20  # ids


class ChangeLog:
    """Ids of changed rows, of which a limited number is kept, however many followers there are.

    It is kept from the first question on. When as many ids as it may hold have come without another one,
    nobody follows, and it is not kept any more. Not thread-safe: whoever changes tables holds the shard's
    lock.

    Args:
        limit: Number of ids.

    Attributes:
        version: Rises with each change that is kept.
        is_kept: Somebody follows.
    """

    def __init__(self, limit: int = _MOST) -> None:
        self.version = 0
        self.is_kept = False
        self._limit = limit
        self._floor = 0  # later changes are known
        self._asked = 0  # version of the last question
        self._count = 0
        self._rows: deque[tuple[int, int, Ids]] = deque()  # version, table, ids
        self._tables: dict[int, int] = {}  # by table the version at which all of it changed

    def add(self, table: int, ids: Ids | None) -> None:
        """Rows of a table have changed or gone; None: all of it may have changed."""
        if not self.is_kept:
            return
        self.version += 1
        if ids is None:
            self._tables[table] = self.version
            return
        self._rows.append((self.version, table, ids.copy()))
        self._count += len(ids)
        while self._count > self._limit:
            self._floor, _, oldest = self._rows.popleft()
            self._count -= len(oldest)
            if self._floor > self._asked:
                self._stop()

    def _stop(self) -> None:
        self.is_kept = False
        self._count = 0
        self._rows.clear()
        self._tables.clear()

    def since(self, version: int) -> Mapping[int, Ids | None] | None:
        """By table the ids that changed after a version; None: all. None in place of it: not known.

        Whatever is known, later changes are.
        """
        if not self.is_kept:
            self.is_kept = True
            self.version += 1
            self._floor = self.version
        self._asked = self.version
        if not self._floor <= version <= self.version:
            return None
        parts: dict[int, list[Ids]] = {}
        for at, table, ids in reversed(self._rows):
            if at <= version:
                break
            parts.setdefault(table, []).append(ids)
        ids_by_table: dict[int, Ids | None] = {
            table: dedup(np.concatenate(several), 1).unique[0] for table, several in parts.items()
        }
        return ids_by_table | {key: None for key, at in self._tables.items() if at > version}
