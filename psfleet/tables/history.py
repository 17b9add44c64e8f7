"""What of a sparse table's history its stamps do not tell: removed rows, and rows set by hand."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["ChangeHistory"]

Ids = NDArray[np.int64]


@dataclass
class ChangeHistory:
    """Events since the oldest mark that is held; nothing is kept while none is.

    Attributes:
        era: Goes up when the table's step is set, after which steps say nothing about order.
        first: Number of the first event that is kept.
        marks: Numbers of the events at which marks are held.
    """

    era: int = 0
    first: int = 0
    marks: list[int] = field(default_factory=list)
    _removed: list[Ids] = field(default_factory=list)
    _written: list[Ids] = field(default_factory=list)

    @property
    def is_kept(self) -> bool:
        """Whether anybody will ask."""
        return bool(self.marks)

    def mark(self) -> int:
        """Hold a mark here; returns the number of the next event."""
        self.marks.append(self.first + len(self._removed))
        return self.marks[-1]

    def release(self, event: int) -> None:
        """Let a mark go, and with the oldest one what only it needed."""
        self.marks.remove(event)
        kept = min(self.marks, default=self.first + len(self._removed))
        gone = kept - self.first
        del self._removed[:gone], self._written[:gone]
        self.first = kept

    def add(self, *, removed: Ids | None = None, written: Ids | None = None) -> None:
        """Rows were removed, or set."""
        if self.is_kept:
            nothing = np.zeros(0, np.int64)
            self._removed.append(nothing if removed is None else removed.copy())
            self._written.append(nothing if written is None else written.copy())

    def since(self, event: int) -> tuple[Ids, Ids]:
        """Ids removed and ids set since a mark, ascending, whatever became of them later."""
        start = event - self.first
        return _union(self._removed[start:]), _union(self._written[start:])


def _union(parts: list[Ids]) -> Ids:
    return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
