"""A worker whose mode is wished for from outside, in the midst of the fleet's dataset.

It makes the calls of psfleet_worker for that: a barrier tells it of the wish, a meeting changes the mode,
a join says so to every server, and what is left of the data is dealt in the new way.
"""

from collections.abc import Generator
from typing import Any

import numpy as np

from psfleet.data.assignment import Plan, Range, length, part
from psfleet.shard.events import Join, Leave
from psfleet.wire.table_messages import write_mode
from psfleet_server.coordinator.barriers import SWITCH, ModeWish, Release
from psfleet_server.coordinator.coordinator import Arrival
from tests.protocol.fleet.calls import CreateTable, Depart, Register
from tests.protocol.fleet.job import COUNTS, ROWS, places
from tests.protocol.fleet.worker import Waits, Worker

__all__ = ["BARRIERS", "Wisher"]

BARRIERS = 3
"""Within the dataset of each worker; at each the mode may change."""

_STEPS = 3  # between two of them


class Wisher(Worker):
    """One process. Its script comes to a barrier between two steps, the first time after a few.

    In sync mode the number of the round says where, so that a later life comes to the same place; who
    has no data comes at once.
    """

    def _run(self) -> Waits:
        registered = self._ask(self.job.home, Register(self.seat, self.boot))
        yield [registered]
        seating = registered.answer
        self.life, self.view, self.met = seating.incarnation, seating.view, seating.met
        self.taken = self.handed = self.barriers = self.changes = 0
        self.mode = self.job.phases[0].mode
        made, last = 0, 0
        if seating.switch is not None:  # perhaps no server has been told yet
            self.mode, made, last = (
                seating.switch.mode,
                seating.switch.number,
                seating.switch.last,
            )
        yield from self._tell(made, last)
        if self.mode == "sync":
            self.sequence = max(seating.first - 1, self.sequence)
            self.open = self.sequence
        for spec in (ROWS, COUNTS):
            yield self._ask_all(CreateTable(spec, self.seat))
        self.begun = self.sequence
        goes_on = True
        while goes_on:
            goes_on = yield from (self._planned() if self.mode == "sync" else self._drawn())
        while self.barriers < BARRIERS:
            yield from self._barrier()
        yield from self._arrive(Arrival(self.seat, self.life, self._next()))
        yield [
            *self._ask_all(Leave(self.seat, self.life, self.sequence)),
            self._ask(self.job.home, Depart(self.seat, self.life)),
        ]

    def _next(self) -> int:
        self.meetings += 1
        return self.meetings

    def _tell(self, switch: int = 0, last: int = 0) -> Waits:
        """Join on all servers, with a change of the mode."""
        joined = self._ask_all(Join(self.seat, self.life, self.mode, 0, switch, last))
        yield joined
        numbers = {asked.answer.number for asked in joined}
        if self.meetings:
            assert len(numbers) == 1, f"servers stand at different places: {numbers}"
        self.switches = max(self.switches, switch)
        self.sequence, self.clock = max(numbers), 0

    # -- meetings ------------------------------------------------------------------------------

    def _barrier(self) -> Generator[Any, None, bool]:
        """Come to the next barrier, and to the change of the mode that it tells; whether there was one."""
        yield from self._flush()
        self.barriers += 1
        passes = self.meetings < self.met
        released = yield from self._arrive(Arrival(self.seat, self.life, self._next()))
        if released.wish is None:
            if self.mode == "sync" and not passes:
                yield from self._tell()
            self.begun = self.sequence
            return False
        changed = yield from self._change(released.wish)
        self.begun = self.sequence
        return changed

    def _change(self, wish: ModeWish) -> Generator[Any, None, bool]:
        said = [int(write_mode(wish.mode)), 0]  # type: ignore[arg-type]  # a mode
        brought = np.array([*said, *(-one for one in said), self.sequence], np.int64)
        self.changes += 1
        arrival = Arrival(
            self.seat,
            self.life,
            self._next(),
            SWITCH,
            brought,
            self.changes,
            self.sequence,
            (self.taken, self.handed),
        )
        released = yield from self._arrive(arrival)
        if self.changes <= self.switches:
            return False
        turns = (self.mode == "sync") != (wish.mode == "sync")
        self.mode = wish.mode  # type: ignore[assignment]  # a mode
        assert released.value is not None
        yield from self._tell(self.changes, int(released.value[4]))
        return turns

    def _arrive(self, arrival: Arrival) -> Generator[Any, None, Release]:
        """In sync mode the others' rounds close without this worker meanwhile."""
        yield from self._flush()
        if self.mode == "sync" and arrival.number > self.met:
            yield self._ask_all(Leave(self.seat, self.life, self.sequence, rest=arrival.number))
        asked = self._ask(self.job.home, arrival)
        yield [asked]
        released: Release = asked.answer
        return released

    def _is_due(self) -> bool:
        if self.barriers == BARRIERS:
            return False
        if self.mode == "sync":
            return self.sequence >= _STEPS * (self.barriers + 1)
        return self.sequence - self.begun >= _STEPS

    # -- data ----------------------------------------------------------------------------------

    def _planned(self) -> Generator[Any, None, bool]:
        """Rounds of sync mode; whether the fleet goes on in another way."""
        plan: Plan
        plan, known = yield from self._deal(round=self.sequence + 1)
        while plan:
            if self._is_due():
                if (yield from self._barrier()):
                    return True
                continue
            number = self.sequence + 1
            if self.view > known:
                plan, known = yield from self._deal(round=number)
            if number > plan.last():
                yield from self._flush()
                if self.view > known:
                    continue
                return False
            yield from self._round(places(plan.share(self.seat, number)))
        return False

    def _drawn(self) -> Generator[Any, None, bool]:
        """Leases of the other modes; whether the fleet goes on in another way."""
        used = self.taken
        while True:
            lease, _ = yield from self._deal(lease=self.taken, used=used)
            if lease == ():
                return False
            if lease is None:
                used = self.taken  # every push is answered before the next call
                if self.barriers < BARRIERS and (yield from self._barrier()):
                    return True
                continue
            turned = yield from self._used_up(lease)
            self.taken, self.handed = self.taken + 1, 0
            if turned:
                return True

    def _used_up(self, lease: tuple[Range, ...]) -> Generator[Any, None, bool]:
        for low in range(0, length(lease), self.job.batch):
            while self._is_due():
                if (yield from self._barrier()):
                    return True
            self.handed = min(low + self.job.batch, length(lease))
            samples = places(part(lease, low, self.handed))
            yield self._push(samples, position=(self.taken, self.handed))
        return False
