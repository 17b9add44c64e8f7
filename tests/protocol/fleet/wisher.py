"""A worker whose mode is wished for from outside, in the midst of the fleet's dataset."""

from psfleet.core.engine.round_plan import Range, RoundPlan, length, part
from psfleet_worker.session.instructions import DataReply, RequestData
from tests.protocol.fleet.asked import Script
from tests.protocol.fleet.calls import AskServers
from tests.protocol.fleet.job import places
from tests.protocol.fleet.worker import Worker

_STEPS = 3  # between two barriers


class Wisher(Worker):
    """One process. Its script comes to a barrier between two steps, the first time after a few.

    In sync mode the number of the round says where, so that a later incarnation comes to the same place; who
    has no data comes at once. It asks for its data itself, as those who have none cannot wait for those
    who are at a barrier already.
    """

    def script(self) -> Script:
        self.taken = self.handed = self.completed = 0
        yield from self.begin()
        self.begun = self.session.sequence
        goes_on = True
        while goes_on:
            sync = self.session.declared.name == "sync"
            goes_on = yield from (self._planned() if sync else self._drawn())
        while self.completed < self.job.barriers:
            yield from self._barrier()
        yield from self.run(self.collectives.gather())
        yield from self.end()

    def reached(self) -> tuple[int, int]:
        return self.taken, self.handed

    def position(self) -> tuple[int, int] | None:
        return self.reached()

    def _barrier(self) -> Script:
        """Come to the next barrier, and to the change of the mode that it tells; whether rounds and leases
        have changed places."""
        self.completed += 1
        if self.job.moves and self.dice.random() < 0.2:
            yield from self.home(AskServers(self.dice.randint(1, 4)))
        turns = self.session.turns
        released = yield from self.run(self.collectives.gather())
        if released.mode_request is not None:
            yield from self.run(
                self.collectives.set_mode(self.job.declared(released.mode_request[0]))
            )
        self.begun = self.session.sequence
        return self.session.turns != turns

    def _is_due(self) -> bool:
        if self.completed == self.job.barriers:
            return False
        if self.session.declared.name == "sync":
            return self.session.sequence >= _STEPS * (self.completed + 1)
        return self.session.sequence - self.begun >= _STEPS

    def _planned(self) -> Script:
        """Rounds of sync mode; whether the fleet goes on in another way."""
        plan, names = yield from self._plan()
        while plan.entries:
            if self._is_due():
                if (yield from self._barrier()):
                    return True
                continue
            if self.session.view > names:
                plan, names = yield from self._plan()
            number = self.session.sequence + 1
            if number > plan.last():
                yield from self.run(self.stream.flush())
                if self.session.view > names:
                    continue
                return False
            yield from self.step(places(plan.share(self.seat, number)))
        return False

    def _plan(self) -> Script:
        dealt: DataReply = yield from self.perform(
            RequestData(1, self.job.batch, round=self.session.sequence + 1)
        )
        assert isinstance(dealt.what, RoundPlan)
        return dealt.what, dealt.view

    def _drawn(self) -> Script:
        """Leases of the other modes; whether the fleet goes on in another way."""
        used = self.taken
        while True:
            request = RequestData(1, self.job.batch, lease=self.taken, used=used)
            lease = (yield from self.perform(request)).what
            if lease == ():
                return False
            if lease is None:
                yield from self.run(self.stream.flush())
                used = self.taken
                if self.completed < self.job.barriers and (yield from self._barrier()):
                    return True
                continue
            used_up = yield from self._used_up(lease)
            self.taken, self.handed = self.taken + 1, 0
            if used_up:
                return True

    def _used_up(self, lease: tuple[Range, ...]) -> Script:
        for low in range(0, length(lease), self.job.batch):
            while self._is_due():
                if (yield from self._barrier()):
                    return True
            self.handed = min(low + self.job.batch, length(lease))
            yield from self.push(places(part(lease, low, self.handed)))
        return False
