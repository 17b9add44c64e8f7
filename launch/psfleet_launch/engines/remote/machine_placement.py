"""Placement of a job's members on machines, and the present locations of servers and processes. Pure.

- Servers are spread evenly: no machine has two more than another.
- A standby is never on the machine of its server.
- All processes of a worker are on one machine, since their links are local sockets.
- Workers go to the machines with the fewest processes.

Only machines with room for the resources that the job promises to the role (--worker-cores and so on) are
considered. Before the job has started, it is refused if there is no such machine. Later a process must not be
left out, so it goes to a machine without room if there is no other.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field

from psfleet.core.base.errors import ConfigError
from psfleet_launch.job.job_plan import Job, Member, needed
from psfleet_launch.job.resources import BOUNDLESS, Resources
from psfleet_launch.supervision.job_events import ServerReady


class MachinePlacement:
    """Machines of a job and the members that are placed on each.

    Args:
        job: Job whose servers and workers are placed at once; standbys follow when they start.
        machines: Names of the machines. Ties are decided by their order.
        sizes: Resources of the machines. A machine without an entry is unlimited.

    Attributes:
        largest: Maximum of cores and of memory that any machine needs, with standbys.

    Raises:
        ConfigError: There is no machine, or just one although servers have standbys, or not enough room.
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
        """Return the members of a machine: servers first, by rank."""
        return sorted(
            member for member, its_machine in self._where.items() if its_machine == machine
        )

    def of_server(self, rank: int) -> str:
        """Return the machine of a server. A new server is placed now."""
        server = Member("server", rank)
        if server not in self._where:
            self._put([server])
        return self._where[server]

    def remove(self, member: Member) -> None:
        """Remove a member that no longer belongs to the job."""
        self._where.pop(member, None)

    def put_standby(self, standby: Member, allowed: Collection[str]) -> str:
        """Place a standby on the allowed machine that has the fewest servers."""
        machines = [machine for machine in self._machines if machine in allowed]
        self._where[standby] = self._emptiest(standby, machines)
        return self._where[standby]

    def lose(self, machine: str) -> list[Member]:
        """Remove a lost machine, and place its servers and workers on other machines, if there are any.

        Returns:
            Former members of the machine. Standbys among them are not placed again.
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
        """Place seats, each rank on one machine."""
        machine_of_rank: dict[int, str] = {}
        for seat in seats:
            if seat.rank not in machine_of_rank:
                machine_of_rank[seat.rank] = self._emptiest(seat, self._machines)
            self._where[seat] = machine_of_rank[seat.rank]

    def _emptiest(self, member: Member, machines: Sequence[str]) -> str:
        """Return the machine with room for the member that has the fewest servers, or for a worker processes.

        Raises:
            ConfigError: No machine has room, and the job has not started.
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
    """Endpoints of a job's servers while they move between machines.

    Attributes:
        moved: New endpoint for each old endpoint, for clients.
        lost: Ranks of servers whose machine was lost and that are not ready elsewhere yet.
    """

    moved: dict[str, str] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    _now: dict[int, str] = field(default_factory=dict)
    _holder: dict[int, Member] = field(default_factory=dict)

    def ready(self, told: ServerReady) -> tuple[ServerReady, bool]:
        """Note that a server or standby is ready.

        A standby that does not listen yet, with port 0, counts as ready at the endpoint of its server.

        Returns:
            Event for the supervisor, and whether clients must be told of new endpoints.
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
        """Forget a server that no longer belongs to the job. A later server may get its rank."""
        self.lost.discard(rank)
        self._now.pop(rank, None)
        self._holder.pop(rank, None)

    def lose(self, members: Iterable[Member]) -> None:
        """Note that the machine of these members is lost. Servers that run elsewhere since then are not
        lost."""
        self.lost |= {member.rank for member in members if self._holder.get(member.rank) == member}


class RunningMembers(dict[Member, str]):
    """Machine of each member that has a process now."""

    def on(self, machines: Collection[str]) -> frozenset[Member]:
        """Return the members that run on these machines."""
        return frozenset(member for member, name in self.items() if name in machines)

    def of_server(self, member: Member, but: Member | None = None) -> set[str]:
        """Return the machines with a process of this member's server: primary, standby, or a cut-off process.

        Args:
            member: Server or standby.
            but: Member that does not count, or None.
        """
        return {
            name
            for running, name in self.items()
            if (running.role, running.rank) == (member.role, member.rank) and running != but
        }
