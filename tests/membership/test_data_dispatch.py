"""What the coordinator keeps of the data that it has handed out."""

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import pytest

from psfleet.core.base.errors import Gap, UsageError
from psfleet.core.engine.round_plan import (
    LOOKAHEAD,
    MOST,
    PlanEntry,
    Range,
    RoundPlan,
    length,
    part,
)
from psfleet.core.engine.shard.membership_view import ViewReport
from psfleet.core.net.message_codec import encode
from psfleet_server.coordinator.coordinator_messages import ViewDecided
from psfleet_server.coordinator.data_dispatch import (
    DataDispatch,
    DatasetRequest,
    LeaseGranted,
    SeatPosition,
)
from psfleet_server.coordinator.membership import Membership

SIZE, BATCH, WORKERS = 60, 3, 3


def dispatch_of(order: DatasetRequest, members: dict[int, int] | None = None) -> DataDispatch:
    """A dispatch that has begun the dataset: in rounds of these members, or leased."""
    dispatch = DataDispatch()
    take(dispatch, order, members)
    return dispatch


def take(
    dispatch: DataDispatch, order: DatasetRequest, members: dict[int, int] | None = None
) -> None:
    """Begin a dataset."""
    begun = dispatch.begin(order, members)
    assert begun is not None
    dispatch.take(begun)


class Trial:
    """Workers that draw leases and use them up batch by batch, as one server hears it from their pushes."""

    def __init__(self, seed: int, epochs: int) -> None:
        self.dice = random.Random(seed)
        self.order = DatasetRequest(1, SIZE, BATCH, epochs)
        self.dispatch = dispatch_of(self.order)
        self.used: Counter[int] = Counter()
        self.newest = WORKERS
        self.incarnations = list(range(1, WORKERS + 1))
        self.taken = dict.fromkeys(self.incarnations, 0)
        self.positions = dict.fromkeys(self.incarnations, (0, 0))

    def run(self) -> Iterator[None]:
        """Until all is used; between two steps."""
        while not self.dispatch.datasets[0].ended:
            worker = self.dice.randrange(WORKERS)
            if self.dice.random() < 0.04:
                self.die(worker)
            else:
                self.step(self.incarnations[worker])
            yield

    def step(self, incarnation: int) -> None:
        """One batch of the present lease; else the next lease."""
        leases, (used, offset) = self.dispatch.leases.get(incarnation), self.positions[incarnation]
        if leases is not None and used < leases.count:
            [(_, ranges), *_] = leases.left((used, offset))
            now = part(ranges, 0, BATCH)
            self.used.update(position for pair in now for position in range(*pair))
            is_whole = length(now) == length(ranges)
            self.positions[incarnation] = (
                (used + 1, 0) if is_whole else (used, offset + length(now))
            )
            return
        order = DatasetRequest(1, SIZE, BATCH, self.order.epochs, lease=used, used=used)
        decision = self.dispatch.lease(order, incarnation, self.incarnations)
        if decision is not None:
            self.dispatch.take(decision)
        self.dispatch.leased(order, incarnation)

    def die(self, worker: int) -> None:
        """The worker's incarnation ends, and its next one begins."""
        incarnation = self.incarnations[worker]
        report = ViewReport(
            incarnations={worker: incarnation}, positions={worker: self.positions[incarnation]}
        )
        self.dispatch.give_back(worker, incarnation, {0: report})
        self.newest += 1
        self.incarnations[worker] = self.newest
        self.positions[self.newest] = (0, 0)

    def bytes(self) -> int:
        """What it takes in a snapshot."""
        return len(encode(ViewDecided(Membership({}), self.dispatch)))


@pytest.mark.parametrize("seed", range(2))
def test_what_is_kept_does_not_grow(seed: int) -> None:
    """Over ten epochs, with workers that die and come back, no more is kept at any time than is out just
    then, and every sample is used once."""
    most, kept = 0, 0
    trial = Trial(seed, 10)
    for _ in trial.run():
        kept = max(kept, sum(len(leases.kept) for leases in trial.dispatch.leases.values()))
        most = max(most, trial.bytes())
    assert trial.used == Counter(range(10 * SIZE))
    assert trial.newest > 2 * WORKERS
    assert kept <= 2 * WORKERS
    assert most < 3000


def test_a_lease_that_is_used_up_is_not_told_again() -> None:
    """A question for it can only be a late repeat."""
    trial = Trial(0, 1)
    for _ in trial.run():
        pass
    with pytest.raises(Gap, match="lease 1 is used up"):
        trial.dispatch.leased(trial.order, trial.incarnations[0])


def test_a_round_that_closed_without_a_worker_is_no_use_of_its_samples() -> None:
    """Worker 1's later incarnation has made round 3 alone, while worker 0 was at the collective for async
    mode."""
    dispatch = dispatch_of(DatasetRequest(1, 12, 1, 1, round=1), {0: 1, 1: 1})
    dispatch.turn(False, {0: SeatPosition(1, round=2), 1: SeatPosition(3, first=3, round=3)})
    assert dispatch.datasets[0].pool == [(4, 5), (6, 12)]
    assert not dispatch.datasets[0].ended


@dataclass(frozen=True)
class Naive:
    """What a plan deals, said position by position."""

    size: int
    batch: int

    def rounds(self, stream: Sequence[int], seats: int) -> list[list[list[int]]]:
        """Of each round what each of so many seats has."""
        leases = []
        for _, epoch in groupby(stream, lambda position: position // self.size):
            left = list(epoch)
            while left:
                now, left = left[: self.batch * seats], left[self.batch * seats :]
                cuts = [len(now) * seat // seats for seat in range(seats + 1)]
                leases.append([now[low:high] for low, high in pairwise(cuts)])
        return leases


def positions(ranges: Iterable[Range]) -> list[int]:
    """One by one."""
    return [position for pair in ranges for position in range(*pair)]


def test_epochs_in_a_row_are_dealt_as_if_each_was_listed() -> None:
    """Shares, what is left and the last round are those of a deal position by position, also after changes
    of the members."""
    for seed in range(60):
        assign(seed)


def assign(seed: int) -> None:
    """Compare some epochs of a plan, and after each of four changes."""
    dice = random.Random(seed)
    naive = Naive(dice.randint(1, 12), dice.randint(1, 5))
    first, seats = 1, tuple(range(dice.randint(1, 3)))
    plan = RoundPlan(
        naive.size, naive.batch, (PlanEntry(1, seats, ((0, naive.size * dice.randint(1, 6)),)),)
    )
    for _ in range(4):
        stream = positions(plan.samples_from(first))
        dealt = naive.rounds(stream, len(seats))
        assert plan.last() == (first + len(dealt) - 1 if dealt else plan.last())
        for number, expected in enumerate(dealt, first):
            assert [positions(plan.share(seat, number)) for seat in seats] == expected
            behind = sum(
                length(plan.share(seat, n)) for n in range(first, number) for seat in seats
            )
            assert positions(plan.samples_from(number)) == stream[behind:]
        closed = first + dice.randint(0, len(dealt))
        first, seats = (
            closed + LOOKAHEAD + 1,
            tuple(sorted(dice.sample(range(4), dice.randint(1, 3)))),
        )
        plan = plan.changed(first, seats, closed, lambda seat, number: True)


def test_a_plan_does_not_grow_with_its_epochs() -> None:
    """As many epochs as there can be: a change of the members costs one entry of a few numbers."""
    plan = RoundPlan(1000, 50, (PlanEntry(1, (0, 1), ((0, MOST // 1000 * 1000),)),))
    for change in range(1, 20):
        closed = 10**9 * change + change
        plan = plan.changed(closed + 3, tuple(range(1 + change % 3)), closed, lambda *_: True)
        assert length(plan.share(0, closed + 3)) > 0
    assert max(len(entry.stream) for entry in plan.entries) <= 2


@pytest.mark.parametrize("round", [0, 1])
def test_what_is_kept_does_not_grow_with_the_epochs(round: int) -> None:
    """Leased or in rounds, a dataset that goes on until it is stopped takes some hundred bytes."""
    order = DatasetRequest(1, 1000, 50, MOST // 1000, round=round)
    dispatch = dispatch_of(order, {0: 1, 1: 1} if round else None)
    if not round:
        for lease in range(100):
            leased = dispatch.lease(dataclasses.replace(order, lease=lease, used=lease), 1, [1])
            assert isinstance(leased, LeaseGranted)
            assert len({low // 1000 for low, _ in leased.ranges}) == 1  # of one epoch
            dispatch.take(leased)
    assert len(encode(ViewDecided(Membership({}), dispatch))) < 1500


def test_too_many_epochs_are_refused() -> None:
    """Positions fit into 62 bits."""
    with pytest.raises(UsageError, match="take fewer epochs, or None"):
        DatasetRequest(1, 1000, 50, MOST)


def test_what_is_left_is_counted() -> None:
    """Of leased data what is not leased, of rounds what no closed one had; of endless data nothing."""
    trial = Trial(1, epochs=2)
    assert trial.dispatch.samples_left(0) == 2 * SIZE
    for _ in trial.run():
        pass
    assert trial.dispatch.samples_left(0) == 0

    rounds = dispatch_of(DatasetRequest(1, SIZE, BATCH, 2), {0: 1, 1: 1})
    assert [rounds.samples_left(closed) for closed in (0, 1, 7)] == [120, 114, 78]
    endless = dispatch_of(DatasetRequest(1, SIZE, BATCH, MOST // SIZE))
    assert endless.samples_left(0) == 0


@pytest.mark.parametrize("round", [0, 1])
def test_the_first_worker_says_the_parts(round: int) -> None:
    """What it has found of a source that gets more parts counts for all, and for the job that resumes."""
    first, other = (DatasetRequest(1, SIZE, BATCH, 1, round=round, parts=parts) for parts in (3, 4))
    members = {0: 1, 1: 1} if round else None
    dispatch = dispatch_of(first, members)
    assert dispatch.begin(other, members) is None
    assert dispatch.datasets[0].request.parts == 3
    resumed = dispatch.left(0, {})
    take(resumed, other, members)
    assert resumed.datasets[0].request.parts == 3
    assert resumed.samples_left(0) == 0  # nobody knows how much there is


def test_only_a_resumed_job_has_further_epochs() -> None:
    """The first worker that asks may have more epochs than the job before, once; another size is refused with
    what to do, and within one job all must ask for the same."""
    begun, longer = DatasetRequest(1, 50, 4, 2), DatasetRequest(1, 50, 4, 3)
    dispatch = dispatch_of(begun)
    with pytest.raises(UsageError, match=r"for others, .*; all workers must use the same datasets"):
        dispatch.begin(longer, None)
    dispatch.inherit()
    with pytest.raises(UsageError, match=r"in what the job goes on from, .* or drop --resume"):
        dispatch.begin(DatasetRequest(1, 51, 4, 3), None)
    take(dispatch, longer)
    assert dispatch.datasets[0].pool == [(0, 100), (100, 150)]
    assert dispatch.begin(longer, None) is None
    with pytest.raises(UsageError, match="for others"):
        dispatch.begin(DatasetRequest(1, 50, 4, 4), None)
