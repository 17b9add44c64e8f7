"""Distributes the samples of datasets to workers: by a plan of rounds in sync mode, otherwise by leases.

In sync mode a dataset's plan says which worker has which samples in which round
(psfleet.core.engine.round_plan). In other modes a worker requests one *lease* of samples after another. If
the worker dies, the samples of its leases that it has not used go back to the pool. A dataset ends when its
pool is empty and all its leases are reported as used up. When the fleet switches between rounds and leases,
the unused samples are distributed again. Pure: requests come in, decisions come out, which take effect once
they are in the log.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from psfleet.core.engine.shard.membership_view import Position, ViewReport
from psfleet.core.net.message_codec import Message

_STEPS = 4  # batches of a lease


@dataclass(frozen=True, slots=True)
class DatasetRequest:
    """A worker's request for data of its `number`-th dataset.

    Attributes:
        number: Ordinal of the dataset in the script, from 1.
        size: Number of samples in an epoch.
        batch: Number of samples in a worker's step. In sync mode this is the worker's share of a round.
        seed: Seed of the order of samples. Server 0 only checks that all workers use the same seed.
        round: In sync mode the worker's next round, otherwise 0.
        lease: In other modes the number of leases (ranges of samples) that the worker's process has received
            already.
        used: Number of these leases that are used up, with all pushes acknowledged.
        group: Number of processes (pipeline stages) that make up one worker. The first of them requests the
            data for all.
        known: Number of these leases that are used up according to the worker's pushes to server 0.
        parts: Number of parts of a growing source that this worker has found. The number in the first request
            for the dataset applies to all workers. 0 means that no parts are added later.
    """

    number: int
    size: int
    batch: int
    epochs: int
    seed: int = 0
    round: int = 0
    lease: int = 0
    used: int = 0
    group: int = 1
    known: int = 0
    parts: int = 0

    def __post_init__(self) -> None:
        if min(self.size, self.batch, self.epochs, self.group) < 1:
            raise UsageError(
                f"a dataset of {self.size} samples, batches of {self.batch} and {self.epochs} epochs; "
                "each must be at least 1"
            )
        if self.size * self.epochs > MOST:
            raise UsageError(
                f"a dataset of {self.size} samples and {self.epochs} epochs has more than {MOST} "
                "positions; take fewer epochs, or None to train until the script stops"
            )

    @property
    def all(self) -> Range:
        """Range of all sample positions of the dataset, numbered through all epochs."""
        return (0, self.size * self.epochs)

    @property
    def is_endless(self) -> bool:
        """True if the dataset continues until the script stops."""
        return self.size * (self.epochs + 1) > MOST or self.parts > 0

    @property
    def same(self) -> tuple[int, ...]:
        """Values that must be equal in the requests of all workers."""
        return (self.size, self.batch, self.epochs, self.seed)

    def extends(self, other: "DatasetRequest") -> bool:
        """Return whether this request is for the same samples with at least as many epochs.

        Batches may differ.
        """
        return (self.size, self.seed) == (other.size, other.seed) and self.epochs >= other.epochs

    def takers(self, seats: Iterable[int]) -> tuple[int, ...]:
        """Return the workers among `seats` that request data, ascending: the first stage of each pipeline."""
        return tuple(sorted(seat for seat in seats if seat % self.group == 0))


class DatasetBegun(Message, frozen=True):
    """Decision to begin distributing a dataset: in sync mode by `plan`, a plan of all rounds."""

    request: DatasetRequest
    plan: RoundPlan | None


class LeaseGranted(Message, frozen=True):
    """Decision to grant a worker process one more lease (range of samples).

    The worker process has used up its first `used` leases.
    """

    incarnation: int
    dataset: int
    ranges: tuple[Range, ...]
    used: int = 0


class DatasetEnded(Message, frozen=True):
    """Decision that a dataset has ended, because all samples have been used."""

    dataset: int


@dataclass(frozen=True, slots=True)
class TornStep:
    """A push that only some servers have, because its worker died while sending it (TORN_STEP in the log).

    Attributes:
        worker, incarnation: The worker, and the number of its process.
        sequences: For each server, the number of the last push that the server has.
    """

    worker: int
    incarnation: int
    sequences: dict[int, int]


@dataclass(frozen=True, slots=True)
class SeatPosition:
    """Progress of a worker when the fleet switches between rounds and leases, with no push in flight.

    Attributes:
        incarnation: Number of the worker's present process.
        first: In sync mode the first round in which the process takes part.
        round: In sync mode the last round that the process has pushed.
        position: In other modes a pair: the number of leases (ranges of samples from server 0) that are
            used up, and the number of samples used of the next lease.
    """

    incarnation: int
    first: int = 1
    round: int = 0
    position: Position = (0, 0)


@dataclass
class Leases:
    """Leases (samples that server 0 hands out) of one worker process.

    Used leases are dropped and only counted.

    Attributes:
        forgotten: Number of used leases that were dropped.
        kept: Dataset number and samples of each lease that is still kept.
        confirmed: Number of leases that the worker has reported as used, with all pushes acknowledged.
    """

    forgotten: int = 0
    kept: list[tuple[int, tuple[Range, ...]]] = field(default_factory=list)
    confirmed: int = 0

    @property
    def count(self) -> int:
        """Number of leases granted to the worker process so far."""
        return self.forgotten + len(self.kept)

    def forget(self, number: int) -> None:
        """Drop the first `number` leases, which every server knows to be used up."""
        count = min(max(number - self.forgotten, 0), len(self.kept))
        del self.kept[:count]
        self.forgotten += count

    def left(self, position: Position) -> list[tuple[int, tuple[Range, ...]]]:
        """Return the dataset number and the remaining samples of each lease that is not used up.

        Args:
            position: The number of leases that are used up, and of samples used of the next lease.
        """
        used, offset = position
        return [
            (dataset, part(ranges, offset if number == used else 0, length(ranges)))
            for number, (dataset, ranges) in enumerate(self.kept, self.forgotten)
            if number >= used
        ]


@dataclass
class DispatchedDataset:
    """State of one dataset.

    Attributes:
        plan: Plan of which worker uses which samples in which round, or None if samples are leased (handed
            out in ranges on request).
        pool: Samples that are not leased yet. Empty if the dataset has a plan.
        ended: True once all samples have been used.
        resumed: True if the pool holds leftover samples of an earlier job or of another mode. The next
            request then decides whether they are planned or leased, and may add epochs.
    """

    request: DatasetRequest
    plan: RoundPlan | None
    pool: list[Range] = field(default_factory=list)
    ended: bool = False
    resumed: bool = False

    def pool_for(self, request: DatasetRequest) -> list[Range]:
        """Return the unused samples of the dataset, and those of the epochs that the request adds."""
        unused = self.pool if self.plan is None else self.plan.unused(request.round - 1)
        low, high = self.request.all[1], request.all[1]
        return [*unused, (low, high)] if low < high else [*unused]


@dataclass
class DataDispatch:
    """State of all datasets of a job.

    Attributes:
        datasets: Datasets in the order in which scripts use them.
        leases: Maps the number of an incarnation (worker process) to its leases (ranges of samples).
        torn: Pushes that only some servers have.
        inherited: After a resume, the numbers of the datasets that the earlier job had begun and that no
            worker has requested since the resume. The first request for such a dataset may add epochs. Not
            part of logs and snapshots.
    """

    datasets: list[DispatchedDataset] = field(default_factory=list)
    leases: dict[int, Leases] = field(default_factory=dict)
    torn: list[TornStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inherited: frozenset[int] = frozenset()

    def samples_left(self, closed: int) -> int:
        """Return the number of samples that no worker has received yet, or 0 if a dataset never ends.

        Args:
            closed: Last closed round, which matters in sync mode only.
        """
        if any(dataset.request.is_endless for dataset in self.datasets):
            return 0
        return sum(
            length(dataset.pool if dataset.plan is None else dataset.plan.unused(closed))
            for dataset in self.datasets
        )

    def begin(
        self, request: DatasetRequest, first_of: Mapping[int, int] | None
    ) -> DatasetBegun | None:
        """Return the decision to begin a dataset, or None if the dataset has begun.

        Args:
            first_of: In sync mode the first round in which each worker takes part, otherwise None.

        Raises:
            UsageError: Another worker uses a different dataset under this number.
            Gap: An earlier dataset has not begun.
        """
        if request.number > len(self.datasets) + 1 or request.number < 1:
            raise Gap(
                f"dataset {request.number} comes after dataset {len(self.datasets)}; all workers must "
                "use the same datasets in the same order"
            )
        if request.number <= len(self.datasets):
            dataset = self.datasets[request.number - 1]
            earlier = dataset.request
            is_inherited = dataset.resumed or request.number in self.inherited
            is_longer = request.epochs > earlier.epochs
            if dataset.ended and request.extends(earlier) and not is_longer:
                return None
            is_dealt_alike = dataset.resumed or (dataset.plan is None) == (first_of is None)
            may_begin = is_inherited and is_dealt_alike if is_longer else dataset.resumed
            if may_begin and request.extends(earlier):
                pool = tuple(dataset.pool_for(request))
                plan = None if first_of is None else _plan(request, first_of, pool)
                return DatasetBegun(replace(request, parts=earlier.parts), plan)
            if earlier.same != request.same:
                known_by, advice = "for others", "all workers must use the same datasets"
                if is_inherited:
                    known_by = "in what the job goes on from"
                    advice = "keep size, batch and seed and at least its epochs, or drop --resume"
                raise UsageError(
                    f"dataset {request.number} is (size, batch, epochs, seed) {earlier.same} {known_by}, "
                    f"{request.same} here; {advice}"
                )
            self._hand_out(request.number)
            return None
        if first_of is None:
            return DatasetBegun(request, None)
        return DatasetBegun(request, _plan(request, first_of, (request.all,)))

    def inherit(self) -> None:
        """Allow the first request for each dataset to add epochs. Call it after a job was resumed."""
        self.inherited = frozenset(range(1, len(self.datasets) + 1))

    def _hand_out(self, number: int) -> None:
        self.inherited -= {number}

    def lease(
        self, request: DatasetRequest, incarnation: int, live: Iterable[int]
    ) -> LeaseGranted | DatasetEnded | None:
        """Return the decision that a worker's request for a lease (a range of samples) needs.

        Returns None if the worker has the requested lease already, or must wait until other workers have used
        up their leases.
        """
        dataset = self.datasets[request.number - 1]
        leases = self.leases.setdefault(incarnation, Leases())
        leases.confirmed = max(request.used, leases.confirmed)
        if request.lease < leases.count or dataset.ended:
            return None
        if dataset.pool:
            low, high = dataset.pool[0]
            # A lease does not cross the end of its epoch. Positions are numbered through all epochs.
            end = (low // request.size + 1) * request.size
            samples = (low, min(high, end, low + _STEPS * request.batch))
            return LeaseGranted(
                incarnation, request.number, (samples,), max(request.used, request.known)
            )
        return None if any(map(self.is_open, live)) else DatasetEnded(request.number)

    def is_open(self, incarnation: int) -> bool:
        """Return whether a lease (range of samples) of the worker process is not confirmed as used up."""
        leases = self.leases.get(incarnation, Leases())
        return max(leases.confirmed, leases.forgotten) < leases.count

    def take(self, decision: DatasetBegun | LeaseGranted | DatasetEnded) -> None:
        """Apply a decision to the state of the datasets and leases."""
        match decision:
            case DatasetBegun(request, plan):
                pool = [request.all]
                self._hand_out(request.number)
                if request.number <= len(self.datasets):  # an earlier job has left samples of it
                    pool = self.datasets.pop(request.number - 1).pool_for(request)
                self.datasets.insert(
                    request.number - 1, DispatchedDataset(request, plan, [] if plan else pool)
                )
            case LeaseGranted(incarnation, number, ranges, used):
                leases = self.leases.setdefault(incarnation, Leases())
                leases.forget(used)
                leases.kept.append((number, ranges))
                pool = self.datasets[number - 1].pool
                pool[0] = (pool[0][0] + length(ranges), pool[0][1])
                if pool[0][0] == pool[0][1]:
                    del pool[0]
            case DatasetEnded(number):
                self.datasets[number - 1].ended = True
                # No worker gets samples of a later dataset before this one has ended, so every lease belongs
                # to this dataset or to earlier ones.
                self._forget_all()

    def change(
        self, closed: int, seats: Sequence[int], counts_in: Callable[[int, int], bool]
    ) -> None:
        """Plan the later rounds again after workers have joined or left (sync mode).

        Args:
            closed: Last closed round. Rounds up to `closed + LOOKAHEAD` keep their plan.
            counts_in: Returns whether a worker, by number, takes part in a round.
        """
        for dataset in self.datasets:
            if dataset.plan is not None:
                dataset.plan = dataset.plan.changed(
                    closed + LOOKAHEAD + 1, dataset.request.takers(seats), closed, counts_in
                )

    def left(self, closed: int, positions: Mapping[int, tuple[int, int]]) -> "DataDispatch":
        """Return the data for a job with another number of workers: every sample that this job has not used.

        Args:
            closed: Last closed round of this job.
            positions: Maps each worker process to a pair: the number of leases (ranges of samples) that are
                used up, and the number of samples used of the next lease.
        """
        dispatch = DataDispatch()
        for dataset, pool in zip(self.datasets, self._pools(positions), strict=True):
            unused = sorted(pool) if dataset.plan is None else list(dataset.plan.unused(closed))
            dispatch.datasets.append(
                DispatchedDataset(dataset.request, None, unused, not unused, resumed=True)
            )
        return dispatch

    def turn(self, to_rounds: bool, positions: Mapping[int, SeatPosition]) -> None:
        """Distribute all unused samples again, in rounds or by leases.

        A round may have closed without a worker that already waited at the mode switch. That worker's
        samples of the round are not used, and go back to the pool.

        Args:
            to_rounds: True if the fleet switches to rounds, False if it switches to leases.
        """
        pools = self._pools({at.incarnation: at.position for at in positions.values()})
        closed = max((at.round for at in positions.values()), default=0)
        for index, (dataset, pool) in enumerate(zip(self.datasets, pools, strict=True)):
            plan = dataset.plan
            if dataset.ended or (plan is None) != to_rounds:
                continue
            if plan is not None:
                # `missed`: samples of rounds that have closed without a worker that already waited at the
                # mode switch. They go back to the pool, together with the samples of later rounds.
                gaps = [
                    plan.missed(seat, max(at.round, at.first - 1), closed)
                    for seat, at in positions.items()
                ]
                pool = [part for ranges in (*gaps, plan.unused(closed)) for part in ranges]
            self.datasets[index] = DispatchedDataset(
                dataset.request, None, sorted(pool), not pool, True
            )
        if to_rounds:
            self._forget_all()

    def _pools(self, positions: Mapping[int, Position]) -> list[list[Range]]:
        """Return, for each dataset, the samples that no worker has or that workers have not used."""
        pools = [list(dataset.pool) for dataset in self.datasets]
        for incarnation, leases in self.leases.items():
            for number, ranges in leases.left(positions.get(incarnation, (0, 0))):
                pools[number - 1] += ranges
        return pools

    def _forget_all(self) -> None:
        for leases in self.leases.values():
            leases.forget(leases.count)

    def give_back(self, worker: int, incarnation: int, reports: Mapping[int, ViewReport]) -> None:
        """Put the unused samples of an ended worker process back into the pool of each dataset.

        The server that has most of the worker's pushes defines how many samples were used. If servers differ,
        the last push is noted as torn (only some servers have it).
        """
        reports_of_it = {
            server: report
            for server, report in reports.items()
            if report.incarnations.get(worker) == incarnation
        }
        sequences = _reached(worker, reports_of_it)
        if len(set(sequences.values())) > 1:
            self.torn.append(TornStep(worker, incarnation, sequences))
        position = max(
            (report.positions.get(worker, (0, 0)) for report in reports_of_it.values()),
            default=(0, 0),
        )
        # Insert at the front of the pool and in reverse, so that the pool keeps the order of the dataset.
        for number, ranges in reversed(self.leases.pop(incarnation, Leases()).left(position)):
            self.datasets[number - 1].pool[:0] = ranges

    def leased(self, request: DatasetRequest, incarnation: int) -> tuple[Range, ...] | None:
        """Return the samples of the lease (range of samples) that a worker requests.

        Returns an empty tuple if the dataset has ended, and None if the worker has to wait.
        """
        leases = self.leases.get(incarnation, Leases())
        if request.lease < leases.forgotten:
            raise Gap(
                f"lease {request.lease + 1} is used up; the incarnation has {leases.forgotten} behind it"
            )
        if request.lease < leases.count:
            number, ranges = leases.kept[request.lease - leases.forgotten]
            if number != request.number:
                raise Gap(f"lease {request.lease + 1} is of dataset {number}, not {request.number}")
            return ranges
        return () if self.datasets[request.number - 1].ended else None


def _reached(worker: int, reports: Mapping[int, ViewReport]) -> dict[int, int]:
    """Return, for each server, the last push of a worker process that the server has.

    Later pushes that had nothing for a server are treated as if the server had them.
    """
    sequences = {server: report.sequences.get(worker, 0) for server, report in reports.items()}
    lasts = reports[0].addressed.get(worker, ()) if 0 in reports else ()
    for server, last in enumerate(lasts):
        if last <= sequences.get(server, -1) <= sequences[0]:
            sequences[server] = sequences[0]
    return sequences


def _plan(
    request: DatasetRequest, first_of: Mapping[int, int], stream: tuple[Range, ...]
) -> RoundPlan:
    """Return the plan that distributes the samples `stream` to the rounds from the request's round on.

    A worker gets samples from the first round in which it takes part (`first_of`).
    """
    # The plan gets an entry for each round in which a worker begins to take part. An entry distributes all
    # samples that the entries before it have not used by then.
    begins = sorted({max(request.round, first) for first in first_of.values()})
    plan = RoundPlan(request.size, request.batch)
    for begin in begins:
        seats = request.takers(seat for seat, first in first_of.items() if first <= begin)
        unplanned = plan.samples_from(begin) if plan.entries else stream
        if unplanned:
            plan = RoundPlan(
                request.size, request.batch, (*plan.entries, PlanEntry(begin, seats, unplanned))
            )
    return plan


def torn_words(torn: Sequence[TornStep]) -> list[str]:
    """Describe in words, for the job's log, the pushes that only some servers have."""
    return [
        f"TORN_STEP: worker {step.worker} died between servers; of its pushes they hold "
        + ", ".join(f"server {server} {last}" for server, last in sorted(step.sequences.items()))
        for step in torn
    ]
