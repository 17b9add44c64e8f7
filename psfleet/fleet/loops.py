"""The loops of a script over its data: who gets which batch, and how far this worker is.

Where snapshots of workers are taken, the place in the loops is remembered with whatever else the script
wants remembered, and a fleet that goes on from a snapshot passes over what lies before that place.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from psfleet import runtime as runtimes
from psfleet.coming import Coming, Peeked
from psfleet.errors import UsageError
from psfleet.program import untrained
from psfleet.remembering import PLACE, Place, Remembered

__all__ = ["Loops"]

T = TypeVar("T")


class Loops:
    """Of one process.

    Args:
        index, workers: Which worker it is, of how many.
        snapshots: Snapshots are taken, or one is gone on from: remember the place.
        meet: Waits until every worker is here.
    """

    def __init__(
        self, index: int, workers: int, snapshots: bool, meet: Callable[[], object]
    ) -> None:
        self._index = index
        self._workers = workers
        self._snapshots = snapshots
        self._meet = meet
        self._remembered: Remembered | None = None
        self._restored: dict[str, Any] = {}
        self._place: Place | None = None
        self._begun = 0

    def remember(self, name: str, thing: Any) -> None:
        """See Fleet.remember."""
        if self._remembered is None:
            self._remembered = Remembered()
            # Only a cluster's has snapshots of workers.
            keep = getattr(runtimes.active(), "keep", None)
            said = keep(self._remembered.state_at) if keep else b""
            self._restored = json.loads(said) if said else {}
        self._remembered.add(name, thing, self._restored.get(name))

    def step_done(self) -> None:
        """See Fleet.step_done."""
        if self._remembered is not None:
            self._remembered.capture(getattr(runtimes.active(), "step", 0))

    def stepping(self, found: Coming[T]) -> Coming[T]:
        """The same batches; what is remembered is taken after each."""

        def taken() -> Iterator[T]:
            for batch in found:
                yield batch
                self.step_done()
            untrained.check()

        return Coming(taken(), found.peek)

    def shard(self, batches: Iterable[T]) -> Coming[T]:
        """See Fleet.shard."""
        if not isinstance(batches, Iterable):
            raise UsageError(
                f"fleet.shard got {batches!r}; it needs the batches themselves: a list, a loader or a "
                "generator"
            )
        own = Peeked(self._own(batches))

        def peek() -> T | None:
            found = own.peek()
            return None if found is None else found[1]

        return Coming(self._sharded(own), peek)

    def _own(self, batches: Iterable[T]) -> Iterator[tuple[int, T]]:
        """This worker's batches with their numbers."""
        return ((n, batch) for n, batch in enumerate(batches) if n % self._workers == self._index)

    def _sharded(self, own: Iterable[tuple[int, T]]) -> Iterator[T]:
        """The batches; the place in the data is noted after each, and the workers meet at the end."""
        place = self._place_in_data()
        loop, self._begun = self._begun, self._begun + 1
        # In the snapshot from which the fleet has started this loop may have begun, or have been over.
        begin = place.item if loop >= place.loop else sys.maxsize
        for number, batch in own:
            if number >= begin:
                yield batch
                place.item = number + 1
                self.step_done()
        place.loop, place.item = max(place.loop, loop + 1), 0 if loop >= place.loop else place.item
        self.step_done()
        self._meet()
        untrained.check()

    def _place_in_data(self) -> Place:
        """How far this worker is in its loops; remembered where snapshots are taken."""
        if self._place is None:
            self._place = Place()
            if self._snapshots:
                self.remember(PLACE, self._place)
        return self._place
