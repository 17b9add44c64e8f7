"""Placement of members on machines, and where servers and processes are now. Pure.

Servers are spread: no machine has two more than another. A standby is never on the machine of its
server. All processes of a worker are on one machine, since their links are local sockets; workers go
where the fewest processes are. All that is only where a machine has room for what the job promises
each role (--worker-cores and so on). Once the job has started a process rather goes where there is no room
than nowhere.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field

from psfleet.core.base.errors import ConfigError
from psfleet_launch.job.job_plan import Job, Member, needed
from psfleet_launch.job.resources import BOUNDLESS, Resources
from psfleet_launch.supervision.job_events import ServerReady


class MachinePlacement:
    """The machines of a job and what each runs.

    Args:
        sizes: Resources of the machines; one that is not there may be of any size.

    Attributes:
        largest: The most that any of them has to have, standbys included.

    Raises:
        ConfigError: There is no machine, or just one and servers have standbys, or no room.
    """

    def __init__(
        self, job: Job, machines: Sequence[str], sizes: Mapping[str, Resources] | None = None
    ) -> None:
        if not machines:
            raise ConfigError("there is no machine to run on; name some")
        if job.request.replicas and len(machines) < 2:
            raise ConfigError(
                "--replicas 1 needs two machines, since a standby is not on the machine of its server; "
                f"there is only {machines[0]!r}"
            )
        self._request = job.request
        self._machines = list(machines)
        self._sizes = sizes or {}
        self._where: dict[Member, str] = {}
        self._has_started = False
        self._put(job.servers)
        self._put(job.workers)
        self.largest = self._with_standbys(job.servers if job.request.replicas else [])
        self._has_started = True

    def _with_standbys(self, servers: Iterable[Member]) -> Resources:
        """Return the resources for the fullest machine once these servers have their standbys."""
        for server in servers:
            allowed = set(self._machines) - {self._where[server]}
            self.put_standby(Member("server", server.rank, copy=1), allowed)
        used = [self._used(machine) for machine in self._machines]
        for server in servers:
            del self._where[Member("server", server.rank, copy=1)]
        return Resources(
            max(used_resources.cores for used_resources in used),
            max(used_resources.memory for used_resources in used),
        )

    def __getitem__(self, member: Member) -> str:
        return self._where[member]

    def __contains__(self, member: Member) -> bool:
        return member in self._where

    def on(self, machine: str) -> list[Member]:
        """The members of a machine: servers first, by rank."""
        return sorted(
            member for member, its_machine in self._where.items() if its_machine == machine
        )

    def of_server(self, rank: int) -> str:
        """The machine of a server; a further one gets its place now."""
        server = Member("server", rank)
        if server not in self._where:
            self._put([server])
        return self._where[server]

    def remove(self, member: Member) -> None:
        """The job has this member no more."""
        self._where.pop(member, None)

    def put_standby(self, standby: Member, allowed: Collection[str]) -> str:
        """Place a standby on the allowed machine that has the fewest servers."""
        machines = [machine for machine in self._machines if machine in allowed]
        self._where[standby] = self._emptiest(standby, machines)
        return self._where[standby]

    def lose(self, machine: str) -> list[Member]:
        """The machine is gone; return its members. Seats go to other machines, if there are any."""
        lost = self.on(machine)
        self._machines.remove(machine)
        for member in lost:
            del self._where[member]
        if self._machines:
            self._put(member for member in lost if member.role == "server" and member.copy < 0)
            self._put(member for member in lost if member.role == "worker")
        return lost

    def _put(self, seats: Iterable[Member]) -> None:
        """Place seats, each rank on one machine."""
        machine_of_rank: dict[int, str] = {}
        for seat in seats:
            if seat.rank not in machine_of_rank:
                machine_of_rank[seat.rank] = self._emptiest(seat, self._machines)
            self._where[seat] = machine_of_rank[seat.rank]

    def _emptiest(self, member: Member, machines: Sequence[str]) -> str:
        """The machine with the fewest processes of the member's kind, of those that have room for it.

        Raises:
            ConfigError: None has, and the job has not started.
        """
        needs = needed(self._request, [member])
        load = self._load("server" if member.role == "server" else "")
        fitting = [machine for machine in machines if needs <= self._free(machine)]
        if not fitting and not self._has_started:
            raise ConfigError(self._no_room(member, needs, machines))
        return min(fitting or machines, key=lambda machine: load[machine])

    def _used(self, machine: str) -> Resources:
        return needed(self._request, self.on(machine))

    def _free(self, machine: str) -> Resources:
        return self._sizes.get(machine, BOUNDLESS) - self._used(machine)

    def _no_room(self, member: Member, needs: Resources, machines: Sequence[str]) -> str:
        member_text = "standby of " * (member.copy >= 0) + str(member.seat)
        best = max(machines, key=lambda machine: astuple(self._free(machine)))
        free, whole = (resources.said(needs) for resources in (self._free(best), self._sizes[best]))
        return (
            f"{member_text} needs {needs}, and no machine has room for it: {best!r} has most left, {free} of "
            f"{whole}; name more machines, or ask for less with --{member.role}-cores and "
            f"--{member.role}-memory"
        )

    def _load(self, role: str) -> Counter[str]:
        return Counter(machine for seat, machine in self._where.items() if role in ("", seat.role))


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
            return ServerReady(told.member, before), False
        self.lost.discard(rank)
        self._now[rank], self._holder[rank] = endpoint, told.member
        was_left = self.moved.pop(endpoint, None)  # a server may have been there earlier
        if endpoint != before:
            self.moved[before] = endpoint
        return told, endpoint != before or was_left is not None

    def forget(self, rank: int) -> None:
        """The job has this server no more; another one may get its rank."""
        self.lost.discard(rank)
        self._now.pop(rank, None)
        self._holder.pop(rank, None)

    def lose(self, members: Iterable[Member]) -> None:
        """These members' machine is lost; a server that another machine has taken over is not."""
        self.lost |= {member.rank for member in members if self._holder.get(member.rank) == member}


class RunningMembers(dict[Member, str]):
    """The machine of each member that has a process."""

    def on(self, machines: Collection[str]) -> frozenset[Member]:
        """Return the members that run on these machines."""
        return frozenset(member for member, name in self.items() if name in machines)

    def of_server(self, member: Member, but: Member | None = None) -> set[str]:
        """The machines that run a process of this member's server: primary, standby, or one given up.

        Args:
            member: Of the server.
            but: Member that does not count.
        """
        return {
            name
            for running, name in self.items()
            if (running.role, running.rank) == (member.role, member.rank) and running != but
        }
