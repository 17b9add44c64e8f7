"""Failover of servers: detects hung processes, and decides which standby takes over and when the next one
starts.

Only the launcher decides, because it knows at once and for certain when a process has ended. Two rules make
sure that no acknowledged push is lost:

- Only a ready standby is promoted. A standby writes its ready file when the primary has begun to wait for
  it before acknowledging pushes. So a ready standby has all acknowledged pushes.
- A primary stops waiting for a standby only when this standby can no longer be promoted. Otherwise the
  primary could acknowledge a push that the promoted standby does not have.

Like the supervisor, this module starts no process and reads no clock. Times are seconds of the launcher's
clock.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from psfleet_launch.job.job_plan import Member

_STEP = 0.5
"""Maximum number of seconds that one call of `look` adds. The launcher calls it about every 0.25 s, so
after a longer time the launcher itself did not run."""


@dataclass
class HangDetector:
    """Detects hung servers and standbys by the time since their last liveness signal.

    Each process writes a byte to its liveness pipe a few times per second (`LivenessPipe` in
    psfleet_server.engine.periodic_threads). Silence is measured only while the launcher itself runs, so that
    no member appears hung after the whole machine was suspended.

    Of a server and its standby (*partners*) at most one is given up, and only if the other has given a
    signal later. If both are silent, neither is given up: both have all acknowledged pushes, and either may
    wake first. A server without a standby is hung after `patience` seconds.

    Attributes:
        patience: Seconds of silence after which a process is hung.
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
        """Record a liveness signal of a member. A member is watched from its first signal on."""
        self._last_signals[member] = self._awake

    def forget(self, member: Member) -> None:
        """Stop watching a member that has ended or is about to end."""
        self._last_signals.pop(member, None)

    def is_silent(self, member: Member) -> bool:
        """Return whether a member has been silent for longer than `patience`. For members without a
        partner."""
        return self._last_signals.get(member, self._awake) + self.patience < self._awake

    def has_hung(self, member: Member, other: Member) -> bool:
        """Return whether a member is hung: its partner's last signal is at least `patience` seconds later."""
        silent_from = self._last_signals.get(member, self._awake) + self.patience
        return silent_from < self._last_signals.get(other, 0.0)


@dataclass(frozen=True)
class PromoteStandby:
    """Promote the standby `member` to primary in place of `before`, which has ended. `term` counts the
    primaries."""

    member: Member
    before: Member
    term: int


@dataclass(frozen=True)
class ReleaseStandbys:
    """Tell the primary `member` to stop waiting for its standbys up to number `attach`. They can never take
    over."""

    member: Member
    attach: int


@dataclass
class Standbys:
    """Primary and standby of every server of a job. Standbys of a server are numbered by `Member.copy`.

    A standby that has ended or taken over is replaced by a new one at once. If a server has had `most`
    replacements in the last `within` seconds, the next one is delayed. Otherwise a standby that cannot run,
    for example because its disk is full, would be sent all rows again and again. New standbys after a
    change of the number of servers are not counted.

    Attributes:
        most: Number of replacements that a server may have in `within` seconds.
        within: Seconds over which replacements are counted.
        now: Present time, in seconds of the caller's clock. The caller sets it.
        delayed: Earliest start of the next standby, for each server whose next standby is delayed.
        primary: Primary of each server, by rank.
        standby: Standby of each server, by rank. Servers without a standby are left out.
        ready: Standbys that may be promoted.
        promoted: Standbys that are taking over now. The next standby of their server is started when they
            are ready, because starting a process would slow down the takeover.
        terms: Term of each server's primary. It is 1 at first and increases by 1 with every takeover.
        prepared: Standbys of the job's future servers, while rows move to another number of servers. Empty
            otherwise.
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
        """Begin with these servers as primaries, which are all ready. Return the standbys to start."""
        self.primary = {member.rank: member for member in servers}
        self.standby, self.ready, self.promoted, self.delayed = {}, set(), set(), {}
        self.terms = dict.fromkeys(self.primary, 1)
        return tuple(map(self._next, self.primary))

    def follows(self, member: Member) -> bool:
        """Return whether a member is a standby now."""
        return self.standby.get(member.rank) == member

    def is_ready(self, member: Member) -> tuple[Member, ...]:
        """Record that a member is ready. If it was promoted, return the next standby to start, else ()."""
        if self.follows(member) or self.prepared.get(member.rank) == member:
            self.ready.add(member)
        if member not in self.promoted:
            return ()
        self.promoted.discard(member)
        return self._replacement(member.rank)

    def due(self) -> tuple[Member, ...]:
        """Return the delayed standbys that may be started now."""
        ranks = [rank for rank, at in self.delayed.items() if at <= self.now]
        return tuple(standby for rank in ranks for standby in self._replacement(rank))

    def unprotected(self) -> dict[int, str]:
        """Return the servers without a ready standby, by rank, with the reason in words."""
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
        """Yield (member, partner) for each member that may be given up. The partner then continues alone.

        A primary may be given up only if its standby is ready. A standby may always be given up.
        """
        for rank, heir in self.standby.items():
            if heir in self.ready:
                yield self.primary[rank], heir
            yield heir, self.primary[rank]

    def has_heir(self, member: Member) -> bool:
        """Return whether a member is a primary whose standby is ready, that is, has all acknowledged
        pushes."""
        rank = member.rank
        return self.primary.get(rank) == member and self.standby.get(rank) in self.ready

    def take_over(self, member: Member) -> PromoteStandby | None:
        """Promote the ready standby of a primary that has ended. Return None if there is no ready standby.

        The caller must remove the standby's ready file before it sends the command. The next ready file
        then means that the takeover is complete.
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
        """Remove a standby that has ended. Return the release for its primary, and the next standby to
        start."""
        rank = member.rank
        del self.standby[rank]
        self.ready.discard(member)
        return ReleaseStandbys(self.primary[rank], member.copy), self._replacement(rank)

    def prepare(self, servers: int) -> tuple[Member, ...]:
        """Return the standbys to start before a change to this number of servers.

        They receive the moved rows. Meanwhile the present standbys continue to follow the present servers.
        """
        self.prepared = {rank: self._numbered(rank) for rank in range(servers)}
        return tuple(self.prepared.values())

    def renew(self, servers: int) -> tuple[list[Member], list[ReleaseStandbys], list[Member]]:
        """Change the number of servers. The former standbys do not have the moved rows, so they are replaced.

        Prepared standbys become the standbys. A server without a prepared standby gets a new one.

        Returns:
            Members to end (removed primaries and all former standbys), releases of the remaining primaries
            from their former standbys, and standbys to start.
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
        # Release each primary from its former standby. Otherwise it would wait for that and acknowledge
        # nothing.
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
        """Return the next standby of a server to start. Empty if there were too many; the start is then
        delayed."""
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
