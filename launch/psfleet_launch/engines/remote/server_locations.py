"""Where servers listen, and which of them have moved to another machine. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.job_events import ServerReady

__all__ = ["ServerLocations"]


@dataclass
class ServerLocations:
    """The endpoints of a job's servers over time.

    Attributes:
        moved: The new endpoint of each old one, for clients.
        lost: Ranks whose machine was lost and that listen nowhere yet.
    """

    moved: dict[str, str] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    _now: dict[int, str] = field(default_factory=dict)
    _holder: dict[int, Member] = field(default_factory=dict)

    def ready(self, told: ServerReady) -> tuple[ServerReady, bool]:
        """A process is ready: the event for the supervisor, and whether clients must look elsewhere.

        A standby that does not listen yet counts as at the endpoint of its server.
        """
        rank, endpoint = told.member.rank, told.endpoint
        before = self._now.get(rank, endpoint)
        if endpoint.endswith(":0"):
            return replace(told, endpoint=before), False
        self.lost.discard(rank)
        self._now[rank], self._holder[rank] = endpoint, told.member
        if endpoint == before:
            return told, False
        self.moved.pop(endpoint, None)  # it may have been there earlier
        self.moved[before] = endpoint
        return told, True

    def lose(self, members: Iterable[Member]) -> None:
        """These members' machine is lost; a server that another machine has taken over is not."""
        self.lost |= {one.rank for one in members if self._holder.get(one.rank) == one}
