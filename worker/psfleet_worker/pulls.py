"""A pull under way: the calls of it, and how their answers become arrays."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import PsfleetError
from psfleet.tables.spec import TableSpec
from psfleet_worker.client import Call, wait_all
from psfleet_worker.parcel import Parcel, Values
from psfleet_worker.routing import DenseRead, SparseRead

__all__ = ["PullTicket"]

Floats = NDArray[np.float32]


class PullTicket:
    """Implements psfleet.runtime.Awaited.

    Args:
        calls: By server; the push before the pull may be in them.
        parcels: One per server.
        dealt: The reads.
        asked: Of each read which servers have a part.
        spec_of: The definition of a table.
    """

    def __init__(
        self,
        calls: dict[int, Call],
        parcels: Sequence[Parcel],
        dealt: Sequence[DenseRead | SparseRead],
        asked: Sequence[Sequence[bool]],
        spec_of: Callable[[int], TableSpec],
    ) -> None:
        self._calls = calls
        self._parcels = parcels
        self._dealt = dealt
        self._asked = asked
        self._spec_of = spec_of
        self._arrived: list[Floats] | None = None

    def wait(self) -> list[Floats]:
        """See Awaited.wait. Gives the places of the answers back, so it comes before they are reused."""
        if self._arrived is None:
            found = self._answers()
            self._arrived = [
                deal.join(values) for deal, values in zip(self._dealt, found, strict=True)
            ]
            for parcel in self._parcels:
                parcel.close()
        return self._arrived

    @property
    def view(self) -> int:
        """The newest view of the fleet that the answers tell of."""
        return max((parcel.view for parcel in self._parcels), default=0)

    def _answers(self) -> list[list[Values | None]]:
        """Of each read what each server gave."""
        try:
            answers = wait_all(list(self._calls.values()))
        except PsfleetError:
            for parcel in self._parcels:
                parcel.lose()
            raise
        values: list[list[Values | None]] = [[None] * len(self._parcels) for _ in self._dealt]
        for server, answer in zip(self._calls, answers, strict=True):
            found = iter(self._parcels[server].answer(answer, self._spec_of))
            for of_read, has_part in zip(values, self._asked, strict=True):
                of_read[server] = next(found) if has_part[server] else None
        return values
