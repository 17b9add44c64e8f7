"""Decides which samples a worker trains on, step by step, from the plan of rounds or from leases.

- In sync mode, server 0 has a plan, and every worker computes its part of each round from the plan.
- In other modes the worker requests *leases*, ranges of samples, one after the other. If a worker consists of
  several pipeline stages, only the first stage requests leases. It sends the samples of each step to the
  other stages.

A mode switch may occur within a dataset. Server 0 then distributes its unused samples again, and every worker
continues with the same dataset by the rules of the new mode.

Pure: a program yields a TrainStep for each step of the dataset, and between them other instructions, which
`psfleet_worker.data_client` carries out.
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

_PAUSE = 0.05  # seconds before server 0 is asked again, while other workers still have leases
_SKIP = ((-1, -1),)  # sent to other stages in place of samples: make a step without samples

Ranges = tuple[Range, ...]


class WorkerData:
    """Datasets of one worker process. Except in sync mode, server 0 hands out samples in leases (ranges).

    Attributes:
        count: Number of datasets so far, including the present one.
        position: Position that the next push reports to servers, or None before the first lease. It is a
            pair: the number of leases that are used up, and the number of samples used of the next lease.
        next_ranges: Samples of the step after the present one, or empty if the worker does not have them yet.
        in_round: True while the script is in a step of a dataset in sync mode. Such a step may make one push.
    """

    def __init__(self, session: Session) -> None:
        self.count = 0
        self.position: tuple[int, int] | None = None
        self.next_ranges: Ranges = ()
        self.in_round = False
        self._session = session
        self._leases = 0  # leases that the script has trained on to their end
        self._used = 0  # leases whose pushes are all acknowledged
        self._handed = 0  # samples of the present lease that the script has got
        self._process = 0
        self._processes = 1

    def validate(self) -> None:
        """Check the invariants, for tests."""
        assert 0 <= self._used <= self._leases
        assert self.position is None or self.position >= (self._used, 0)

    @property
    def reached(self) -> tuple[int, int]:
        """Number of leases (ranges of samples) that are used up, and of samples used of the next lease.

        Valid once all pushes are applied.
        """
        return self._leases, self._handed

    def steps(
        self, batch: int, merged: int = 1, process: int = 0, processes: int = 1
    ) -> Program[None]:
        """Return the program of the next dataset, which yields a TrainStep for each step.

        Args:
            merged: Number of steps whose gradients are merged into one push.
            process: Number of this pipeline stage within the worker. Stage 0 requests samples for all stages.
            processes: Number of pipeline stages of the worker.
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
        """Train on all rounds of the dataset. Returns True if the dataset continues in another mode."""
        session, turns = self._session, self._session.turns
        # After the flush the previous round is closed, so the plan of the next round is final.
        yield FlushPushes()
        plan, view = yield from self._plan(batch)
        if not plan.entries:  # the dataset was used up by leases, in another mode
            return False
        self._check_begin(plan)
        while True:
            number = session.sequence + 1
            if session.view > view:
                plan, view = yield from self._plan(batch)
            # After the last round: a worker that ends now may return samples to the plan. So the last push is
            # committed first, and the dataset has ended only if no new view has come with the commit.
            if number > plan.last():
                yield FlushPushes()
                if session.view > view:
                    continue
                return False
            session.progress.catch_up()  # samples planned from here on have not been pushed
            # The plan contains only first stages. All stages of a worker use the samples of its first stage.
            for ranges in _parts(plan.share(session.worker - self._process, number), merged):
                self.in_round = True
                try:
                    yield TrainStep(ranges)
                finally:  # the script may leave its loop within the step
                    self.in_round = False
                if session.turns != turns:
                    return True
            # Every round needs a push of every worker, even a push without samples or gradients.
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
        """Return how many pushes the step of round `number` has made: 0 or 1. Raises UsageError for more."""
        pushes = self._session.sequence + 1 - number
        if pushes > 1:
            raise UsageError(
                f"{pushes} pushes in one step of fleet.dataset; in sync mode make one for each batch, "
                "or use fleet.shard"
            )
        return pushes

    def _tell(self, ranges: Ranges) -> Program[None]:
        """Send the next step's samples to the worker's other stages. Empty ranges end the dataset."""
        if self._processes > 1:
            yield TellStages(ranges)

    def _follow_first_stage(self) -> Program[bool]:
        """Train on the steps that the first stage announces. Returns True if the mode has changed."""
        turns = self._session.turns
        while self._session.turns == turns:
            ranges: Ranges = yield HearStages()
            if not ranges:
                return False
            yield SkipStep() if ranges == _SKIP else TrainStep(ranges)
        return True

    def _leased(self, batch: int) -> Program[bool]:
        """Train on leases until the dataset has ended.

        Returns True if the dataset continues in another mode.
        """
        turns = self._session.turns
        while (lease := (yield from self._lease(batch))) is not None:
            self._session.progress.catch_up()  # no sample of a lease was trained on before
            yield from self._use(lease, batch)
            self._leases, self._handed = self._leases + 1, 0
            # After a switch to rounds, server 0 has distributed the unused samples of the lease again.
            if self._session.turns != turns:
                self._used, self.position = self._leases, (self._leases, 0)
                return True
        yield from self._tell(())
        return False

    def _use(self, lease: Ranges, batch: int) -> Program[None]:
        """Train on the steps of a lease, until its end or until the fleet switches to rounds."""
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
        """Return the next lease, or None if the dataset has ended.

        While server 0 has no samples left, other workers may still die and return samples, so the worker
        waits. It also reports its own leases as used, because the dataset ends only when all leases are
        used.
        """
        while True:
            dealt: DataReply = yield RequestData(
                self.count, batch, lease=self._leases, used=self._used
            )
            if dealt.what is not None:
                assert not isinstance(dealt.what, RoundPlan)
                return dealt.what or None
            if self._used == self._leases:
                yield Pause(_PAUSE)
            # In a mode such as ssp, pulls of other workers wait for pushes of this one. It has no data, so it
            # makes steps without samples.
            if self._session.declared.pull_gate:
                yield from self._tell(_SKIP)
                yield SkipStep()
            yield from self._settle()

    def _settle(self) -> Program[None]:
        yield FlushPushes()
        self._used = self._leases
        self.position = (self._leases, 0)


def _parts(share: Ranges, count: int) -> Iterator[Ranges]:
    """Split the share into `count` nearly equal parts, and yield the parts that are not empty."""
    total = length(share)
    for index in range(count):
        low, high = total * index // count, total * (index + 1) // count
        if low < high:
            yield part(share, low, high)
