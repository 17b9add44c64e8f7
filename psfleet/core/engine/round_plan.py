"""Sync mode: which samples of a dataset each worker has in which round.

A plan is a pure function of what the coordinator has decided: the order in which requests arrive
plays no part, so that the same decisions give the same bits (rules R3 to R5 of docs/protocol.md).

Samples are named by their position: sample i of epoch e has position e * size + i. An entry of a plan
gives a stream of positions to some seats from one round on, until the next entry begins. Epochs do
not share a round; the seats share the last round of an epoch evenly.

Whole epochs in a row are one range, whatever their number: nothing here takes longer, or
more room, for more of them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Range = tuple[int, int]
"""Positions from the first number up to, and without, the second."""

MOST = 1 << 62
"""Positions of a dataset at most. One that goes on until it is stopped has as many epochs as fit."""


LOOKAHEAD = 2
"""Rounds after the last closed one that a change of the members leaves as they were planned: a worker
takes the samples of a round as soon as the round before the last is closed."""


@dataclass
class SourceParts:
    """Number of parts of a source that become more while it is read, such as partitions of a topic.

    Attributes:
        count: Number of those that this worker has found; from the first step of a dataset on of those that
            the worker has found which came to it first, so that all read alike.
    """

    count: int


def length(ranges: Iterable[Range]) -> int:
    """Return the number of positions."""
    return sum(high - low for low, high in ranges)


def part(ranges: Iterable[Range], low: int, high: int) -> tuple[Range, ...]:
    """The positions number `low` up to `high` of the ranges."""
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
    """Part of an epoch that is left; `repeats` times, in as many epochs in a row, if that is all of it."""

    ranges: tuple[Range, ...]
    repeats: int = 1


def epoch_ranges(ranges: Iterable[Range], size: int) -> list[EpochRange]:
    """The ranges, those of one epoch together, in order."""
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
    """The same positions in the same order; what follows without a gap is one range."""
    joint: list[Range] = []
    for low, high in ranges:
        if joint and joint[-1][1] == low:
            low = joint.pop()[0]
        joint.append((low, high))
    return tuple(joint)


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """From round `first` on these seats share the stream, in order of seat."""

    first: int
    seats: tuple[int, ...]
    stream: tuple[Range, ...]


@dataclass(frozen=True)
class RoundPlan:
    """Plan of one dataset: the samples of each seat in each round.

    Attributes:
        size: Samples of an epoch.
        batch: Samples of one seat in one round.
        entries: In order of their rounds; never changed, only followed by others or replaced whole.
        withdrawn: Rounds and seats whose share others have since: the seat is not in the round.
    """

    size: int
    batch: int
    entries: tuple[PlanEntry, ...] = ()
    withdrawn: frozenset[tuple[int, int]] = frozenset()

    def share(self, seat: int, number: int) -> tuple[Range, ...]:
        """Return the seat's samples in round `number`; none if it has no part in it."""
        entry = self._entry(number)
        if entry is None or seat not in entry.seats:
            return ()
        place, seats = entry.seats.index(seat), len(entry.seats)
        for span, start, rounds in self._spans(entry):
            if start <= number < start + span.repeats * rounds:
                epoch, within = divmod(number - start, rounds)
                offset = within * self.batch * seats
                take = min(self.batch * seats, length(span.ranges) - offset)
                low, high = take * place // seats, take * (place + 1) // seats
                return _shifted(part(span.ranges, offset + low, offset + high), epoch * self.size)
        return ()

    def last(self) -> int:
        """Return the last round in which a seat has samples; 0: there is none."""
        number = 0
        for index, entry in enumerate(self.entries):
            ends = [start + span.repeats * rounds - 1 for span, start, rounds in self._spans(entry)]
            if ends:
                number = max(number, ends[-1])
            if index + 1 < len(self.entries):
                number = min(number, self.entries[index + 1].first - 1)
        return number

    def samples_from(self, number: int) -> tuple[Range, ...]:
        """Return the samples of round `number` and of later ones."""
        entry = self._entry(number)
        if entry is None or not entry.seats:  # no seat had any of it
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
        """Return the samples that no round up to `closed` has used, in order."""
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
        """Return the seat's samples of rounds after `after`, up to `closed`, which closed without it."""
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
        """The plan after a change of the members.

        Args:
            number: From this round on `seats` share what is left.
            closed: The last round that is closed anywhere.
            counts_in: Function that tells whether a seat is a member of a round. What those that
                are not had in rounds between comes again.
        """
        out = [
            (between, seat)
            for between in range(closed + 1, number)
            for seat in self._seats(between)
            if not counts_in(seat, between) and (between, seat) not in self.withdrawn
        ]
        withdrawn_ranges = [
            positions for between, seat in out for positions in self.share(seat, between)
        ]
        rest = self.samples_from(number)
        unchanged = not withdrawn_ranges and self._seats(number) == tuple(seats)
        if unchanged or not (withdrawn_ranges or rest):
            return self
        before = tuple(entry for entry in self.entries if entry.first < number)
        entries = (*before, PlanEntry(number, tuple(seats), (*withdrawn_ranges, *rest)))
        withdrawn = frozenset(pair for pair in self.withdrawn if pair[0] > closed) | set(out)
        return RoundPlan(self.size, self.batch, entries, withdrawn)

    def _entry(self, number: int) -> PlanEntry | None:
        return next((e for e in reversed(self.entries) if e.first <= number), None)

    def _seats(self, number: int) -> tuple[int, ...]:
        entry = self._entry(number)
        return () if entry is None else entry.seats

    def _spans(self, entry: PlanEntry) -> list[tuple[EpochRange, int, int]]:
        """The ranges of an entry by epochs, each with its first round and the rounds of one epoch."""
        spans = []
        start = entry.first
        for span in epoch_ranges(entry.stream, self.size) if entry.seats else []:
            rounds = -(-length(span.ranges) // (self.batch * len(entry.seats)))
            spans.append((span, start, rounds))
            start += span.repeats * rounds
        return spans
