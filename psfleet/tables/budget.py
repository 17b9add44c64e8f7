"""The memory that the tables of one server share."""

import math
from dataclasses import dataclass, field

from psfleet.errors import UsageError

__all__ = ["MemoryBudget", "tables_share"]


@dataclass
class MemoryBudget:
    """What each table takes, and whether it may take more. Asked by the tables themselves.

    Attributes:
        limit: Bytes that they may take in all; None: as many as there are.
        held: Bytes of pushes that wait for their round.
        place: Whose memory it is, as messages say it.
        advice: What to do if it does not suffice, as they say it.
    """

    limit: int | None = None
    held: int = 0
    place: str = "memory"
    advice: str = (
        "Give the server more memory, use more servers, or let rows go (entry=CapacityEntry())"
    )
    _taken: dict[str, int] = field(default_factory=dict)

    def take(self, table: str, total: int) -> None:
        """The table takes so many bytes now."""
        self._taken[table] = total

    def room(self, table: str = "") -> int:
        """Bytes that this table may take in all; without a name: that are left."""
        assert self.limit is not None
        others = sum(total for name, total in self._taken.items() if name != table)
        return self.limit - self.held - others

    def fits(self, table: str, total: int) -> bool:
        """Whether the table may take so many bytes in all."""
        return self.limit is None or total <= max(self.room(table), self._taken.get(table, 0))

    def check(self, table: str, total: int, wanted: str) -> None:
        """Refuse what does not fit.

        Raises:
            UsageError: It names the table and what was `wanted`.
        """
        if not self.fits(table, total):
            raise UsageError(
                f"table {table!r} was asked to {wanted}, for which it needs {_mib(total)} of {self.place}; "
                f"this server may give it {_mib(max(self.room(table), 0))}. {self.advice}"
            )


def tables_share(free: float, asked: int) -> float:
    """Bytes that tables may take of so many that are free.

    An eighth is left for the gradients, ids and sums of the calls under way.

    Args:
        free: Bytes.
        asked: Bytes that they are allowed at most; 0: it is not said.
    """
    return min(free * 7 / 8, asked or math.inf)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
