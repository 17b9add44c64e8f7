"""Placement of a job's members on machines, and the present locations of servers and processes.

- Servers are distributed evenly: the numbers of servers on two machines differ by one at most.
- A standby is never on the machine of its server.
- All processes of a worker are on the same machine, because they are connected by local sockets.
- A worker is placed on the machine with the fewest processes.

A machine must have enough free cores and memory for the resources that the job promises to the member
(--worker-cores and so on). If no machine has, a job that is starting is refused. In a running job every
process must be placed somewhere, so then a machine without enough resources is used.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field

from psfleet.core.base.errors import ConfigError
from psfleet_launch.job.job_plan import Job, Member, needed
from psfleet_launch.job.resources import BOUNDLESS, Resources
from psfleet_launch.supervision.job_events import ServerReady


class MachinePlacement:
    """Machines of a job, and the members that are placed on each machine.

    Args:
        job: Job whose servers and workers are placed now. Standbys are placed when they start.
        machines: Names of the machines. Of equally good machines the first one is chosen.
        sizes: Resources of the machines. A machine without an entry has no limits.

    Attributes:
        largest: Largest number of cores, and largest memory, that a machine needs including standbys.

    Raises:
        ConfigError: There is no machine, only one machine for servers with standbys, or not enough resources.
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
        """Return the largest resources that a machine needs when each of these servers has its standbys."""
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
        """Return the members on a machine: servers first, in order of rank."""
        return sorted(
            member for member, its_machine in self._where.items() if its_machine == machine
        )

    def of_server(self, rank: int) -> str:
        """Return the machine of a server. If the server is not placed yet, place it."""
        server = Member("server", rank)
        if server not in self._where:
            self._put([server])
        return self._where[server]

    def remove(self, member: Member) -> None:
        """Remove a member that no longer belongs to the job."""
        self._where.pop(member, None)

    def put_standby(self, standby: Member, allowed: Collection[str]) -> str:
        """Place a standby on that allowed machine which has the fewest servers, and return the machine."""
        machines = [machine for machine in self._machines if machine in allowed]
        self._where[standby] = self._emptiest(standby, machines)
        return self._where[standby]

    def lose(self, machine: str) -> list[Member]:
        """Remove a lost machine, and place its servers and workers on other machines if there are any.

        Returns:
            Members that were on the machine. Standbys are not placed again.
        """
        lost = self.on(machine)
        self._machines.remove(machine)
        for member in lost:
            del self._where[member]
        if self._machines:
            self._put(member for member in lost if member.role == "server" and member.copy < 0)
            self._put(member for member in lost if member.role == "worker")
        return lost

    def _put(self, seats: Iterable[Member]) -> None:
        """Place servers or workers. All processes of the same rank are placed on the same machine."""
        machine_of_rank: dict[int, str] = {}
        for seat in seats:
            if seat.rank not in machine_of_rank:
                machine_of_rank[seat.rank] = self._emptiest(seat, self._machines)
            self._where[seat] = machine_of_rank[seat.rank]

    def _emptiest(self, member: Member, machines: Sequence[str]) -> str:
        """Return the machine to place a member on, of those with enough resources for the member.

        It has the fewest servers if the member is a server, or the fewest processes if it is a worker.

        Raises:
            ConfigError: No machine has enough resources, and the job has not started.
        """
        needs = needed(self._request, [member])
        load = Counter(
            machine
            for seat, machine in self._where.items()
            if member.role != "server" or seat.role == "server"
        )
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


@dataclass
class ServerLocations:
    """Endpoints of a job's servers while they move between machines.

    Attributes:
        moved: New endpoint for each old endpoint, for clients that know only the old one.
        lost: Ranks of servers whose machine was lost and that are not ready on another machine yet.
    """

    moved: dict[str, str] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    _now: dict[int, str] = field(default_factory=dict)
    _holder: dict[int, Member] = field(default_factory=dict)

    def ready(self, told: ServerReady) -> tuple[ServerReady, bool]:
        """Record that a server or standby is ready.

        A standby does not listen before a takeover (port 0). Its event then has the endpoint of its server.

        Returns:
            Event for the supervisor, and whether clients must be notified of new endpoints.
        """
        rank, endpoint = told.member.rank, told.endpoint
        before = self._now.get(rank, endpoint)
        if endpoint.endswith(":0"):
            return ServerReady(told.member, before), False
        self.lost.discard(rank)
        self._now[rank], self._holder[rank] = endpoint, told.member
        was_left = self.moved.pop(
            endpoint, None
        )  # a server may come back to an endpoint that it had left
        if endpoint != before:
            self.moved[before] = endpoint
        return told, endpoint != before or was_left is not None

    def forget(self, rank: int) -> None:
        """Remove a server that no longer belongs to the job. A later server may get the same rank."""
        self.lost.discard(rank)
        self._now.pop(rank, None)
        self._holder.pop(rank, None)

    def lose(self, members: Iterable[Member]) -> None:
        """Record that the machine of these members is lost. A server that runs on another machine by now is
        not affected.
        """
        self.lost |= {member.rank for member in members if self._holder.get(member.rank) == member}


class RunningMembers(dict[Member, str]):
    """Machine of each member that has a running process."""

    def on(self, machines: Collection[str]) -> frozenset[Member]:
        """Return the members that run on these machines."""
        return frozenset(member for member, name in self.items() if name in machines)

    def of_server(self, member: Member, but: Member | None = None) -> set[str]:
        """Return the machines with a process of the member's server: its primary, a standby, or a cut-off
        process.

        Args:
            but: Member to leave out, or None.
        """
        return {
            name
            for running, name in self.items()
            if (running.role, running.rank) == (member.role, member.rank) and running != but
        }
