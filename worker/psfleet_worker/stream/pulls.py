"""A pull under way: the calls of it, and how their answers become arrays."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import PsfleetError
from psfleet.platform.interrupts import deferred
from psfleet.schema.table import TableSpec
from psfleet_worker.connection.call import Call, wait_all
from psfleet_worker.connection.request import ServerRequest, Values
from psfleet_worker.sharding.pull_splitting import DenseRead, SparseRead

__all__ = ["FleetPull"]

Floats = NDArray[np.float32]


class FleetPull:
    """Implements psfleet.runtime.interface.PendingPull.

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
        parcels: Sequence[ServerRequest],
        dealt: Sequence[DenseRead | SparseRead],
        asked: Sequence[Sequence[bool]],
        spec_of: Callable[[int], TableSpec],
    ) -> None:
        self._calls = calls
        self._parcels = parcels
        self._dealt = dealt
        self._asked = asked
        self._spec_of = spec_of
        self._found: list[list[Values | None]] | None = None  # of each read what each server gave
        self._joined: list[Floats] | None = None

    @deferred()
    def wait(self) -> list[Floats]:
        """See PendingPull.wait."""
        return self.join()

    def join(self) -> list[Floats]:
        """As `wait`, of which the caller has seen to interrupts.

        Gives the places of the answers back, so it comes before they are reused.
        """
        if self._joined is None:
            found = self.arrive()
            self._joined = [
                deal.join(values) for deal, values in zip(self._dealt, found, strict=True)
            ]
            self._found = None
            for parcel in self._parcels:
                parcel.close()
        return self._joined

    def arrive(self) -> list[list[Values | None]]:
        """Wait until the answers are here: of each read what each server gave, not yet joined."""
        if self._found is None and self._joined is None:
            self._found = self._answers()
        return self._found or []

    @property
    def is_under_way(self) -> bool:
        """Whether a server has not answered yet."""
        return not all(call.ended for call in self._calls.values())

    @property
    def view(self) -> int:
        """The newest view of the fleet that the answers tell of."""
        return max((parcel.view for parcel in self._parcels), default=0)

    def _answers(self) -> list[list[Values | None]]:
        try:
            answers = wait_all(list(self._calls.values()))
        except (PsfleetError, KeyboardInterrupt):
            for parcel in self._parcels:
                parcel.lose()
            raise
        values: list[list[Values | None]] = [[None] * len(self._parcels) for _ in self._dealt]
        for server, answer in zip(self._calls, answers, strict=True):
            found = iter(self._parcels[server].answer(answer, self._spec_of))
            for of_read, has_part in zip(values, self._asked, strict=True):
                of_read[server] = next(found) if has_part[server] else None
        return values
