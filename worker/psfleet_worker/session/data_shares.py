"""The data that the fleet hands out, as one worker takes it step by step.

In a mode with rounds every worker works out its part of each from the plan; in the others the first stage
of a worker takes leases and tells its other stages. A change between both may fall within a dataset: what is
not used of it is then dealt anew, and every worker goes on in the new way.

Pure: the programs of a dataset yield its steps, and between them what is to be asked of the fleet.
"""

from collections.abc import Iterator

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.round_plan import Range, RoundPlan, length, part
from psfleet_worker.session.instructions import (
    DataReply,
    FlushPushes,
    HearStages,
    Pause,
    Program,
    RequestData,
    SkipStep,
    TellStages,
    TrainStep,
)
from psfleet_worker.session.worker_session import Session

_PAUSE = 0.05  # seconds between questions while others still have leases
_SKIP = ((-1, -1),)  # told to other stages in place of samples: a step without any

Ranges = tuple[Range, ...]


class WorkerData:
    """Datasets of one incarnation of a worker.

    Attributes:
        count: Number of datasets so far, with the present one.
        position: Position that the next push reports to servers: leases used up, and samples of the next one.
        next_ranges: Positions of the step after the present one, if the worker has them already.
        in_round: The script is in a step of a dataset in rounds, each of which has one push of every worker.
    """

    def __init__(self, session: Session) -> None:
        self.count = 0
        self.position: tuple[int, int] | None = None
        self.next_ranges: Ranges = ()
        self.in_round = False
        self._session = session
        self._leases = 0
        self._used = 0
        self._handed = 0
        self._process = 0
        self._processes = 1

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        assert 0 <= self._used <= self._leases
        assert self.position is None or self.position >= (self._used, 0)

    @property
    def reached(self) -> tuple[int, int]:
        """Leases used up, and samples of the next one that are handed out; all are pushed."""
        return self._leases, self._handed

    def steps(
        self, batch: int, merged: int = 1, process: int = 0, processes: int = 1
    ) -> Program[None]:
        """Yield the next dataset, with a TrainStep for each step.

        Args:
            batch: Samples of a step.
            merged: Steps of one push.
            process: Stage of the worker that this process is; the first one takes leases for all.
        """
        self.count += 1
        self._process, self._processes = process, processes
        return self._alternating(batch, merged)

    def _alternating(self, batch: int, merged: int) -> Program[None]:
        goes_on = True
        while goes_on:
            self.next_ranges = ()
            if self._session.declared.has_rounds:
                goes_on = yield from self._in_rounds(batch * merged, merged)
            elif self._process:
                goes_on = yield from self._follow_first_stage()
            else:
                goes_on = yield from self._leased(batch)

    def _in_rounds(self, batch: int, merged: int) -> Program[bool]:
        """Yield all rounds of the dataset; return whether it goes on in another mode."""
        session, turns = self._session, self._session.turns
        yield FlushPushes()  # what is planned for the next round is final from here on
        plan, view = yield from self._plan(batch)
        if not plan.entries:  # it was leased, in another mode, and is over
            return False
        self._check_begin(plan)
        while True:
            number = session.sequence + 1
            if session.view > view:
                plan, view = yield from self._plan(batch)
            if number > plan.last():
                yield FlushPushes()
                if session.view > view:
                    continue
                return False
            session.progress.catch_up()  # what is planned from here on has not been pushed
            # All stages of a worker use what its first one has.
            for ranges in _parts(plan.share(session.worker - self._process, number), merged):
                self.in_round = True
                try:
                    yield TrainStep(ranges)
                finally:  # a script may leave its loop
                    self.in_round = False
                if session.turns != turns:
                    return True
            if self._made(number) == 0:
                yield SkipStep()

    def _check_begin(self, plan: RoundPlan) -> None:
        begin, session = plan.entries[0].first, self._session
        if session.sequence + 1 != begin and session.first <= begin:
            raise UsageError(
                f"dataset {self.count} begins in round {begin} for others, here in round "
                f"{session.sequence + 1}; all workers must make the same steps between datasets"
            )

    def _plan(self, batch: int) -> Program[tuple[RoundPlan, int]]:
        dealt: DataReply = yield RequestData(self.count, batch, round=self._session.sequence + 1)
        assert isinstance(dealt.what, RoundPlan)
        return dealt.what, dealt.view

    def _made(self, number: int) -> int:
        """Pushes since round `number` was next; a round gets one of every worker."""
        pushes = self._session.sequence + 1 - number
        if pushes > 1:
            raise UsageError(
                f"{pushes} pushes in one step of fleet.dataset; in sync mode make one for each batch, "
                "or use fleet.shard"
            )
        return pushes

    def _tell(self, ranges: Ranges) -> Program[None]:
        """Announce the next step's samples to the worker's other stages; empty: there are no more."""
        if self._processes > 1:
            yield TellStages(ranges)

    def _follow_first_stage(self) -> Program[bool]:
        """Train the steps that the first stage announces; return whether the mode has changed."""
        turns = self._session.turns
        while self._session.turns == turns:
            ranges: Ranges = yield HearStages()
            if not ranges:
                return False
            yield SkipStep() if ranges == _SKIP else TrainStep(ranges)
        return True

    def _leased(self, batch: int) -> Program[bool]:
        """Yield all leases of the dataset; return whether it goes on in another mode."""
        turns = self._session.turns
        while (lease := (yield from self._lease(batch))) is not None:
            self._session.progress.catch_up()  # nothing is leased twice
            yield from self._use(lease, batch)
            self._leases, self._handed = self._leases + 1, 0
            if self._session.turns != turns:  # what is left of the lease is distributed again
                self._used, self.position = self._leases, (self._leases, 0)
                return True
        yield from self._tell(())
        return False

    def _use(self, lease: Ranges, batch: int) -> Program[None]:
        """Yield the steps of a lease, until the mode changes."""
        turns, total = self._session.turns, length(lease)
        for low in range(0, total, batch):
            high = min(low + batch, total)
            self._handed = high
            self.position = (self._leases, high)
            self.next_ranges = part(lease, high, min(high + batch, total))
            ranges = part(lease, low, high)
            yield from self._tell(ranges)
            yield TrainStep(ranges)
            if self._session.turns != turns:
                return

    def _lease(self, batch: int) -> Program[Ranges | None]:
        """Return the next lease; None: everything is used."""
        while True:
            dealt: DataReply = yield RequestData(
                self.count, batch, lease=self._leases, used=self._used
            )
            if dealt.what is not None:
                assert not isinstance(dealt.what, RoundPlan)
                return dealt.what or None
            if self._used == self._leases:
                yield Pause(_PAUSE)
            if self._session.declared.pull_gate:  # who has no data does not hold back the others
                yield from self._tell(_SKIP)
                yield SkipStep()
            yield from self._settle()

    def _settle(self) -> Program[None]:
        yield FlushPushes()
        self._used = self._leases
        self.position = (self._leases, 0)


def _parts(share: Ranges, count: int) -> Iterator[Ranges]:
    """Yield the share in `count` nearly equal parts; empty ones are left out."""
    total = length(share)
    for index in range(count):
        low, high = total * index // count, total * (index + 1) // count
        if low < high:
            yield part(share, low, high)
