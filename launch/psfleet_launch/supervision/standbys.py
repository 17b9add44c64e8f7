"""Which process of a server's place is its primary, which its standby, and who takes over.

The launcher decides, and nobody else: it knows at once, and for certain, when a process has ended. It
promotes only a standby that the primary waits for (its ready file says so), so what anybody was told
is in the standby. It releases a primary from a standby only after that one can never be promoted.

Pure, like the supervisor.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from psfleet_launch.job.job_plan import Member

__all__ = ["PromoteStandby", "ReleaseStandbys", "Standbys"]


@dataclass(frozen=True)
class PromoteStandby:
    """Tell this standby to take its server's place, with this term."""

    member: Member
    before: Member
    term: int


@dataclass(frozen=True)
class ReleaseStandbys:
    """Tell this primary that its standbys up to this number will never take over."""

    member: Member
    attach: int


@dataclass
class Standbys:
    """The standbys of a job; a member's `copy` is the number of its attachment.

    Attributes:
        most: Standbys that a server may have one after the other.
        primary: Who has each server's place.
        standby: Who follows it; a standby that was lost for good is not there.
        ready: Standbys that may be promoted.
        promoted: Those that take over at the moment; only then the next standby is started, for what
            it costs to start one would make the takeover slower.
        terms: Of each server: 1, and 1 more for every takeover.
    """

    most: int = 20
    primary: dict[int, Member] = field(default_factory=dict)
    standby: dict[int, Member] = field(default_factory=dict)
    ready: set[Member] = field(default_factory=set)
    promoted: set[Member] = field(default_factory=set)
    terms: dict[int, int] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)

    def begin(self, servers: Iterable[Member]) -> tuple[Member, ...]:
        """The servers are ready; the standbys that are to be started."""
        self.primary = {member.rank: member for member in servers}
        self.standby, self.ready, self.promoted = {}, set(), set()
        self.terms = dict.fromkeys(self.primary, 1)
        return tuple(found for rank in self.primary for found in self._next(rank))

    @property
    def awaited(self) -> set[Member]:
        """Whose ready files are to come: standbys', and those of who takes over."""
        return set(self.standby.values()) - self.ready | self.promoted

    def follows(self, member: Member) -> bool:
        """Whether this member is a standby now."""
        return self.standby.get(member.rank) == member

    def is_ready(self, member: Member) -> tuple[Member, ...]:
        """The member has told so; the standby that is to be started."""
        if self.follows(member):
            self.ready.add(member)
        if member not in self.promoted:
            return ()
        self.promoted.discard(member)
        return self._next(member.rank)

    def pairs(self) -> Iterator[tuple[Member, Member]]:
        """Members that can be given up, each with the one that then goes on alone."""
        for rank, heir in self.standby.items():
            if heir in self.ready:
                yield self.primary[rank], heir
            yield heir, self.primary[rank]

    def has_heir(self, member: Member) -> bool:
        """Whether the member is a primary whose standby has all that was acknowledged."""
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
        return ReleaseStandbys(self.primary[rank], member.copy), self._next(rank)

    def _next(self, rank: int) -> tuple[Member, ...]:
        number = self._numbers.get(rank, 0) + 1
        if number > self.most:
            return ()
        self._numbers[rank] = number
        self.standby[rank] = Member("server", rank, copy=number)
        return (self.standby[rank],)
