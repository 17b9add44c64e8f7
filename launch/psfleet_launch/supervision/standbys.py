"""Primary and standby of each server: which of them hangs, and which standby takes over.

The launcher alone decides: it knows at once, and for certain, when a process has ended. It
promotes only a standby that the primary waits for (its ready file says so), so all that was acknowledged
is in the standby. It releases a primary from a standby only after that one can never be promoted.

Pure, like the supervisor.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from psfleet_launch.job.job_plan import Member

_STEP = 0.5
"""Seconds, the most that count between two looks; the launcher looks twice as often."""


@dataclass
class HangDetector:
    """Times of the last liveness signal of each process.

    Each writes one to a pipe of its own a few times per second (psfleet_server.engine.liveness). Silence is
    counted in time that the launcher has itself been awake: after all processes were stopped, as when a
    machine sleeps, no member counts as silent. Of a server and its standby only one is given up, and only
    after a later signal of the other: two that are silent may wake in any order, and whichever wakes first
    has all that was acknowledged. A server without a standby is given up if it gave no signal while the
    launcher was awake for so long.

    Attributes:
        patience: Seconds of silence after which a process counts as hung.
    """

    patience: float
    _awake: float = 0.0
    _looked: float | None = None
    _last_signals: dict[Member, float] = field(default_factory=dict)

    def look(self, at: float) -> None:
        """It is `at`, in seconds of the launcher's clock."""
        if self._looked is not None:
            self._awake += min(at - self._looked, _STEP)
        self._looked = at

    def take_signal(self, member: Member) -> None:
        """Note that the member runs now. It is watched from its first liveness signal on."""
        self._last_signals[member] = self._awake

    def forget(self, member: Member) -> None:
        """The member has ended, or is about to: its silence means nothing."""
        self._last_signals.pop(member, None)

    def is_silent(self, member: Member) -> bool:
        """Return whether this member, alone in its place, has been silent for longer than `patience`."""
        return self._last_signals.get(member, self._awake) + self.patience < self._awake

    def has_hung(self, member: Member, other: Member) -> bool:
        """Return whether to give up this member of a pair: it is silent, and the other one is not."""
        silent_from = self._last_signals.get(member, self._awake) + self.patience
        return silent_from < self._last_signals.get(other, 0.0)


@dataclass(frozen=True)
class PromoteStandby:
    """Promote this standby to its server's primary, with this term."""

    member: Member
    before: Member
    term: int


@dataclass(frozen=True)
class ReleaseStandbys:
    """Release this primary from its standbys up to this number: they will never take over."""

    member: Member
    attach: int


@dataclass
class Standbys:
    """The standbys of a job; a member's `copy` is the number of its attachment.

    A standby that ended or took over is replaced at once, unless its server has had `most` replacements in
    the last `within` seconds: one that cannot live, as on a full disk, must not be filled again and again.
    The next one then starts as soon as the rate allows it. Moves to another number of servers do not count.

    Attributes:
        most, within: Replacements that a server may have in that many seconds.
        now: Seconds of the caller's clock, which sets it.
        delayed: For each server whose next standby has to wait, the time from which it may start.
        primary: Primary of each server.
        standby: Standby that follows it; a standby that was lost for good is not there.
        ready: Standbys that may be promoted.
        promoted: Those that take over at the moment; only then the next standby is started, for what
            it costs to start one would make the takeover slower.
        terms: Terms of each server: 1, and 1 more for every takeover.
        prepared: Standbys of the servers that the job is going to have, if rows move.
    """

    most: int = 20
    within: float = 600.0
    now: float = 0.0
    delayed: dict[int, float] = field(default_factory=dict)
    primary: dict[int, Member] = field(default_factory=dict)
    standby: dict[int, Member] = field(default_factory=dict)
    ready: set[Member] = field(default_factory=set)
    promoted: set[Member] = field(default_factory=set)
    terms: dict[int, int] = field(default_factory=dict)
    prepared: dict[int, Member] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)
    _replaced: dict[int, list[float]] = field(default_factory=dict)

    def begin(self, servers: Iterable[Member]) -> tuple[Member, ...]:
        """The servers are ready; the standbys that are to be started."""
        self.primary = {member.rank: member for member in servers}
        self.standby, self.ready, self.promoted, self.delayed = {}, set(), set(), {}
        self.terms = dict.fromkeys(self.primary, 1)
        return tuple(map(self._next, self.primary))

    @property
    def awaited(self) -> set[Member]:
        """Members whose ready files are to come: standbys, and those that take over."""
        return set(self.standby.values()) - self.ready | self.promoted

    def follows(self, member: Member) -> bool:
        """Return whether this member is a standby now."""
        return self.standby.get(member.rank) == member

    def is_ready(self, member: Member) -> tuple[Member, ...]:
        """Note that the member is ready; return the standby to start."""
        if self.follows(member) or self.prepared.get(member.rank) == member:
            self.ready.add(member)
        if member not in self.promoted:
            return ()
        self.promoted.discard(member)
        return self._replacement(member.rank)

    def due(self) -> tuple[Member, ...]:
        """Return the standbys to start that had to wait until now."""
        ranks = [rank for rank, at in self.delayed.items() if at <= self.now]
        return tuple(standby for rank in ranks for standby in self._replacement(rank))

    def unprotected(self) -> dict[int, str]:
        """Return the servers that no standby could take over now, by rank, with the reason."""
        reasons: dict[int, str] = {}
        for rank, primary in self.primary.items():
            heir = self.standby.get(rank)
            if rank in self.delayed:
                reasons[rank] = (
                    f"{primary} had no standby, since {self.most} others were started in its place "
                    f"within {self.within / 60:g} minutes"
                )
            elif heir is None:
                reasons[rank] = f"{primary} had no standby"
            elif heir not in self.ready:
                reasons[rank] = f"its standby, {heir}, was not ready"
        return reasons

    def pairs(self) -> Iterator[tuple[Member, Member]]:
        """Members that can be given up, each with the one that then goes on alone."""
        for rank, heir in self.standby.items():
            if heir in self.ready:
                yield self.primary[rank], heir
            yield heir, self.primary[rank]

    def has_heir(self, member: Member) -> bool:
        """Return whether the member is a primary whose standby has all that was acknowledged."""
        rank = member.rank
        return self.primary.get(rank) == member and self.standby.get(rank) in self.ready

    def take_over(self, member: Member) -> PromoteStandby | None:
        """Return the standby that takes over from an ended primary; None: there is none.

        The ready file of who does is to be removed before it hears of that.
        """
        if not self.has_heir(member):
            return None
        rank = member.rank
        heir = self.standby[rank]
        self.primary[rank] = heir
        del self.standby[rank]
        self.ready.discard(heir)
        self.promoted.discard(member)
        self.promoted.add(heir)
        self.terms[rank] += 1
        return PromoteStandby(heir, member, self.terms[rank])

    def replace(self, member: Member) -> tuple[ReleaseStandbys, tuple[Member, ...]]:
        """This standby has ended: its primary must not wait for it; the next standby."""
        rank = member.rank
        del self.standby[rank]
        self.ready.discard(member)
        return ReleaseStandbys(self.primary[rank], member.copy), self._replacement(rank)

    def prepare(self, servers: int) -> tuple[Member, ...]:
        """The job may have so many servers soon; the standbys to start for what they are going to hold."""
        self.prepared = {rank: self._numbered(rank) for rank in range(servers)}
        return tuple(self.prepared.values())

    def renew(self, servers: int) -> tuple[list[Member], list[ReleaseStandbys], list[Member]]:
        """The job has so many servers, whose rows none of the present standbys has.

        Those that were prepared follow from now on; where there are none others are started.

        Returns:
            The members to end, the primaries' releases, and the standbys to start.
        """
        leavers = [member for rank, member in self.primary.items() if rank >= servers]
        before, self.standby, self.prepared = [*self.standby.values()], self.prepared, {}
        self.delayed = {}
        self.ready.intersection_update(self.standby.values())
        self.promoted -= {*leavers}
        self.primary = {
            rank: self.primary.get(rank, Member("server", rank)) for rank in range(servers)
        }
        self.terms = {rank: self.terms.get(rank, 1) for rank in self.primary}
        released = [
            ReleaseStandbys(self.primary[member.rank], member.copy)
            for member in before
            if member.rank in self.primary
        ]
        started = [
            self._next(rank)
            for rank, primary in self.primary.items()
            if primary not in self.promoted and rank not in self.standby
        ]
        return [*leavers, *before], released, started

    def _replacement(self, rank: int) -> tuple[Member, ...]:
        """The next standby of a server that has lost one; none yet if it has lost too many of late."""
        recent = [at for at in self._replaced.get(rank, []) if at > self.now - self.within]
        if len(recent) >= self.most:
            self.delayed[rank] = (recent[0] if recent else self.now) + self.within
            return ()
        self.delayed.pop(rank, None)
        self._replaced[rank] = [*recent, self.now]
        return (self._next(rank),)

    def _next(self, rank: int) -> Member:
        self.standby[rank] = self._numbered(rank)
        return self.standby[rank]

    def _numbered(self, rank: int) -> Member:
        self._numbers[rank] = self._numbers.get(rank, 0) + 1
        return Member("server", rank, copy=self._numbers[rank])
