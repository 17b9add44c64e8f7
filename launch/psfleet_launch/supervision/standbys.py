"""Failover of servers: detects hung processes, and decides which standby takes over and when the next starts.

The launcher alone decides, because it knows at once and for certain when a process has ended. Two rules keep
every acknowledged push:

- Only a ready standby is promoted. Its ready file says that the primary waits for it before it acknowledges
  anything, so the standby has all that was acknowledged.
- A primary is released from waiting for a standby only once that standby can never be promoted. In the other
  order the primary could acknowledge a push that the promoted standby does not have.

Pure, like the supervisor: no process, no clock. Times are seconds of the launcher's clock.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from psfleet_launch.job.job_plan import Member

_STEP = 0.5
"""Maximum of seconds that count between two looks. The launcher looks about every 0.25 s, so a longer gap
means that the launcher itself did not run."""


@dataclass
class HangDetector:
    """Detector of hung servers and standbys, by the time of each process's last liveness signal.

    Each process writes a byte to its pipe a few times per second (psfleet_server.engine.liveness). Silence is
    counted in time during which the launcher itself was awake: when a whole machine was suspended, no member
    counts as silent.

    Of a server and its standby at most one is given up, and only after a later signal of its partner. If both
    are silent, both are left: they may wake in any order, and either of them has all that was acknowledged. A
    server without a standby has hung after `patience` alone.

    Attributes:
        patience: Seconds of silence after which a process counts as hung.
    """

    patience: float
    _awake: float = 0.0
    _looked: float | None = None
    _last_signals: dict[Member, float] = field(default_factory=dict)

    def look(self, at: float) -> None:
        """Advance the time to `at`, in seconds of the launcher's clock. Call it at least every 0.5 s."""
        if self._looked is not None:
            self._awake += min(at - self._looked, _STEP)
        self._looked = at

    def take_signal(self, member: Member) -> None:
        """Note that the member runs now. It is watched from its first liveness signal on."""
        self._last_signals[member] = self._awake

    def forget(self, member: Member) -> None:
        """Stop watching a member that has ended or is about to: its silence means nothing."""
        self._last_signals.pop(member, None)

    def is_silent(self, member: Member) -> bool:
        """Return whether this member, which has no standby, has been silent for longer than `patience`."""
        return self._last_signals.get(member, self._awake) + self.patience < self._awake

    def has_hung(self, member: Member, other: Member) -> bool:
        """Return whether to give up this member: its partner `other` has signalled `patience` after it."""
        silent_from = self._last_signals.get(member, self._awake) + self.patience
        return silent_from < self._last_signals.get(other, 0.0)


@dataclass(frozen=True)
class PromoteStandby:
    """Promote the standby `member` to primary, with this term, in the place of the ended `before`."""

    member: Member
    before: Member
    term: int


@dataclass(frozen=True)
class ReleaseStandbys:
    """Tell the primary `member` not to wait for its standbys up to number `attach`: they never take over."""

    member: Member
    attach: int


@dataclass
class Standbys:
    """Primary and standby of every server of a job. A member's `copy` numbers the standbys of its server.

    A standby that ended or took over is replaced at once, unless its server has had `most` replacements in
    the last `within` seconds. A standby that cannot live, as on a full disk, would otherwise be sent all rows
    again and again. The next standby starts as soon as the rate allows it. Standbys that are renewed because
    the number of servers changes do not count.

    Attributes:
        most: Number of replacements that a server may have in `within` seconds.
        within: Seconds over which replacements are counted.
        now: Present time, in seconds of the caller's clock. The caller sets it.
        delayed: Earliest start of the next standby, for each server that has had too many.
        primary: Primary of each server.
        standby: Standby that follows each primary. A server without one is missing.
        ready: Standbys that may be promoted.
        promoted: Standbys that take over at the moment. The next standby of their servers starts when they
            are ready, because starting a process would slow the takeover.
        terms: Term of each server's primary. It begins with 1 and grows by 1 with every takeover.
        prepared: Standbys of the servers that the job is going to have, while rows move. Empty otherwise.
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
        """Begin with these servers as primaries, all ready, and return the standbys to start."""
        self.primary = {member.rank: member for member in servers}
        self.standby, self.ready, self.promoted, self.delayed = {}, set(), set(), {}
        self.terms = dict.fromkeys(self.primary, 1)
        return tuple(map(self._next, self.primary))

    @property
    def awaited(self) -> set[Member]:
        """Members that are not ready yet: standbys that catch up, and promoted standbys."""
        return set(self.standby.values()) - self.ready | self.promoted

    def follows(self, member: Member) -> bool:
        """Return whether this member is a standby now."""
        return self.standby.get(member.rank) == member

    def is_ready(self, member: Member) -> tuple[Member, ...]:
        """Note that the member is ready, and return the standby to start, if it was promoted."""
        if self.follows(member) or self.prepared.get(member.rank) == member:
            self.ready.add(member)
        if member not in self.promoted:
            return ()
        self.promoted.discard(member)
        return self._replacement(member.rank)

    def due(self) -> tuple[Member, ...]:
        """Return the delayed standbys whose time has come, to be started."""
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
        """Yield each member that can be given up, with its partner, which then goes on alone.

        A primary can be given up only for a ready standby; a standby always.
        """
        for rank, heir in self.standby.items():
            if heir in self.ready:
                yield self.primary[rank], heir
            yield heir, self.primary[rank]

    def has_heir(self, member: Member) -> bool:
        """Return whether the member is a primary whose standby has all that was acknowledged."""
        rank = member.rank
        return self.primary.get(rank) == member and self.standby.get(rank) in self.ready

    def take_over(self, member: Member) -> PromoteStandby | None:
        """Promote the ready standby of an ended primary, or return None if there is none.

        The caller removes the standby's ready file before it sends the command. The next ready file then
        means that the takeover is complete.
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
        """Drop a standby that has ended. Return its primary's release, and the next standby to start."""
        rank = member.rank
        del self.standby[rank]
        self.ready.discard(member)
        return ReleaseStandbys(self.primary[rank], member.copy), self._replacement(rank)

    def prepare(self, servers: int) -> tuple[Member, ...]:
        """Return the standbys to start for a job that may soon have this number of servers.

        They receive the moved rows while the present standbys go on following the present servers.
        """
        self.prepared = {rank: self._numbered(rank) for rank in range(servers)}
        return tuple(self.prepared.values())

    def renew(self, servers: int) -> tuple[list[Member], list[ReleaseStandbys], list[Member]]:
        """Go over to this number of servers, whose rows none of the present standbys has.

        Prepared standbys follow from now on. A server without a prepared standby gets a new one.

        Returns:
            The members to end (removed primaries, all former standbys), the releases of the remaining
            primaries from their former standbys, and the standbys to start.
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
        # A primary must no longer wait for its former standby, or it would acknowledge nothing.
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
        """Return the next standby of a server; empty, with the start delayed, if there were too many."""
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
