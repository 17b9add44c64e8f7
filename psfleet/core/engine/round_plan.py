"""RoundPlan: which samples of a dataset each worker processes in each round of sync mode.

A plan follows from the decisions of the coordinator alone, and not from the order in which requests arrive.
So the same decisions give bit-identical results (rules R3 to R5 of docs/protocol.md).

Samples are numbered by position: sample i of epoch e has position e * size + i. An entry of a plan divides a
sequence of positions among some seats (worker ranks), from one round on until the next entry begins. Within
an entry each round takes the next batch for every seat:

    size 18, batch 4, seats 0 and 1

    round       1               2                3              4 (next epoch)
    seat 0      0 to 3          8 to 11          16             18 to 21
    seat 1      4 to 7          12 to 15         17             22 to 25

A round has samples of one epoch only, and the seats share the last round of an epoch evenly. Several whole
epochs in a row are stored as one range, so that time and memory do not depend on the number of epochs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Range = tuple[int, int]
"""First position, and the position after the last."""

MOST = 1 << 62
"""Largest number of positions. A dataset that runs until it is stopped has as many epochs as fit."""


LOOKAHEAD = 2
"""Number of rounds after the last closed round that stay as planned when the members change.

A worker reads the samples of a round as soon as the round two before it is closed.
"""


@dataclass
class SourceParts:
    """Number of parts of a source that gets more parts while it is read, such as partitions of a topic.

    Attributes:
        count: Number of parts that this worker has found. When the first step of a dataset begins, this
            becomes the number that the first worker to arrive has found, so that all workers read the same
            parts.
    """

    count: int


def length(ranges: Iterable[Range]) -> int:
    """Return the number of positions (samples) in these ranges."""
    return sum(high - low for low, high in ranges)


def part(ranges: Iterable[Range], low: int, high: int) -> tuple[Range, ...]:
    """Return the positions (samples) number `low` to `high` - 1 of those in these ranges, counted from 0."""
    parts = []
    at = 0
    for start, end in ranges:
        first, last = max(low - at, 0), min(high - at, end - start)
        if first < last:
            parts.append((start + first, start + last))
        at += end - start
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class EpochRange:
    """Part of an epoch that is left, or several whole epochs in a row.

    Attributes:
        ranges: Positions (numbers of samples) of the part, or of the first of the epochs.
        repeats: Number of epochs in a row; above 1 only for whole epochs.
    """

    ranges: tuple[Range, ...]
    repeats: int = 1


def epoch_ranges(ranges: Iterable[Range], size: int) -> list[EpochRange]:
    """Split ranges of positions (numbers of samples) by epochs of `size` samples, in the given order."""
    spans: list[EpochRange] = []
    open_epoch = -1  # the epoch of the last range, if there may be more of it
    for low, high in ranges:
        while low < high:
            epoch, offset = divmod(low, size)
            if epoch == open_epoch:
                end = min(high, (epoch + 1) * size)
                spans[-1] = EpochRange((*spans[-1].ranges, (low, end)))
            elif offset == 0 and high - low >= size:
                repeats, open_epoch = (high - low) // size, -1
                spans.append(EpochRange(((low, low + size),), repeats))
                end = low + repeats * size
            else:
                end, open_epoch = min(high, (epoch + 1) * size), epoch
                spans.append(EpochRange(((low, end),)))
            low = end
    return spans


def _shifted(ranges: Iterable[Range], by: int) -> tuple[Range, ...]:
    return tuple((low + by, high + by) for low, high in ranges)


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the same positions in the same order, with adjacent ranges joined."""
    joint: list[Range] = []
    for low, high in ranges:
        if joint and joint[-1][1] == low:
            low = joint.pop()[0]
        joint.append((low, high))
    return tuple(joint)


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """Entry of a plan: divides positions (numbers of samples) among seats (worker ranks).

    Attributes:
        first: First round of the entry. The entry ends where the next one begins.
        seats: Seats that share the positions, in this order.
    """

    first: int
    seats: tuple[int, ...]
    stream: tuple[Range, ...]


@dataclass(frozen=True)
class RoundPlan:
    """Plan of one dataset: the samples of each seat (worker rank) in each round.

    Attributes:
        size: Number of samples of an epoch.
        batch: Number of samples of one seat in one round.
        entries: Entries, each for the rounds until the next entry begins, in the order of rounds.
        withdrawn: Pairs (round, seat), where the seat is no longer a member of the round. The samples that
            the seat had in that round are in later rounds.
    """

    size: int
    batch: int
    entries: tuple[PlanEntry, ...] = ()
    withdrawn: frozenset[tuple[int, int]] = frozenset()

    def share(self, seat: int, number: int) -> tuple[Range, ...]:
        """Return the samples of a seat (worker rank) in round `number`; empty if it has none."""
        entry = self._entry(number)
        if entry is None or seat not in entry.seats:
            return ()
        index, seats = entry.seats.index(seat), len(entry.seats)
        for span, start, rounds in self._spans(entry):
            if start <= number < start + span.repeats * rounds:
                epoch, within = divmod(number - start, rounds)
                offset = within * self.batch * seats
                take = min(self.batch * seats, length(span.ranges) - offset)
                # Each seat gets an even share, also in the last round of an epoch, which may be short.
                low, high = take * index // seats, take * (index + 1) // seats
                return _shifted(part(span.ranges, offset + low, offset + high), epoch * self.size)
        return ()

    def last(self) -> int:
        """Return the last round in which some worker has samples, or 0 if there is none."""
        number = 0
        for index, entry in enumerate(self.entries):
            ends = [start + span.repeats * rounds - 1 for span, start, rounds in self._spans(entry)]
            if ends:
                number = max(number, ends[-1])
            if index + 1 < len(self.entries):
                number = min(number, self.entries[index + 1].first - 1)
        return number

    def samples_from(self, number: int) -> tuple[Range, ...]:
        """Return the samples of round `number` and of all later rounds in the same entry of the plan."""
        entry = self._entry(number)
        if entry is None or not entry.seats:  # no seat has used any sample of the entry
            return () if entry is None else entry.stream
        ranges: list[Range] = []
        for span, start, rounds in self._spans(entry):
            epoch, within = divmod(max(number - start, 0), rounds)
            if epoch < span.repeats:
                first = within * self.batch * len(entry.seats)
                ranges += _shifted(part(span.ranges, first, length(span.ranges)), epoch * self.size)
            if epoch + 1 < span.repeats:
                low = span.ranges[0][0]
                ranges.append((low + (epoch + 1) * self.size, low + span.repeats * self.size))
        return _joined(ranges)

    def unused(self, closed: int) -> tuple[Range, ...]:
        """Return the samples that no round up to `closed` has used."""
        if not self.entries:
            return ()
        last = self.entries[-1]
        if last.first <= closed + 1:
            return self.samples_from(closed + 1)
        used_before = [
            positions
            for number in range(closed + 1, last.first)
            for seat in self._seats(number)
            if (number, seat) not in self.withdrawn
            for positions in self.share(seat, number)
        ]
        return tuple(sorted((*used_before, *last.stream)))

    def missed(self, seat: int, after: int, closed: int) -> tuple[Range, ...]:
        """Return a worker's samples in rounds `after` + 1 to `closed`, which were closed without its push."""
        begin = max(after + 1, self.entries[0].first) if self.entries else closed + 1
        return tuple(
            positions
            for number in range(begin, closed + 1)
            if (number, seat) not in self.withdrawn
            for positions in self.share(seat, number)
        )

    def changed(
        self, number: int, seats: Sequence[int], closed: int, counts_in: Callable[[int, int], bool]
    ) -> "RoundPlan":
        """Return the plan after workers have joined or left.

        Args:
            number: First round in which `seats` share the remaining samples.
            seats: Seats (worker ranks) that take part from then on.
            closed: Last round that any server has closed.
            counts_in: Returns whether a seat (first argument) is a member of a round. In the rounds between
                `closed` and `number`, samples of seats that are no members move to later rounds.
        """
        # Rounds up to `number` - 1 keep their plan, but some of their seats will make no push. The samples of
        # these seats come first in the new entry.
        out = [
            (between, seat)
            for between in range(closed + 1, number)
            for seat in self._seats(between)
            if not counts_in(seat, between) and (between, seat) not in self.withdrawn
        ]
        withdrawn_ranges = [
            positions for between, seat in out for positions in self.share(seat, between)
        ]
        remaining = self.samples_from(number)
        unchanged = not withdrawn_ranges and self._seats(number) == tuple(seats)
        if unchanged or not (withdrawn_ranges or remaining):
            return self
        before = tuple(entry for entry in self.entries if entry.first < number)
        entries = (*before, PlanEntry(number, tuple(seats), (*withdrawn_ranges, *remaining)))
        withdrawn = frozenset(pair for pair in self.withdrawn if pair[0] > closed) | set(out)
        return RoundPlan(self.size, self.batch, entries, withdrawn)

    def _entry(self, number: int) -> PlanEntry | None:
        return next((e for e in reversed(self.entries) if e.first <= number), None)

    def _seats(self, number: int) -> tuple[int, ...]:
        entry = self._entry(number)
        return () if entry is None else entry.seats

    def _spans(self, entry: PlanEntry) -> list[tuple[EpochRange, int, int]]:
        """Return the epochs of an entry, each with its first round and its number of rounds per epoch."""
        spans = []
        start = entry.first
        for span in epoch_ranges(entry.stream, self.size) if entry.seats else []:
            rounds = -(-length(span.ranges) // (self.batch * len(entry.seats)))
            spans.append((span, start, rounds))
            start += span.repeats * rounds
        return spans
