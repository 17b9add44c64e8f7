"""Which machine runs which member. Pure, and the same for the same request and machines.

Servers are spread: no machine has two more than another. A standby is never on the machine of its
server. All processes of a worker are on one machine, since their links are local sockets; workers go
where the fewest processes are.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from psfleet.errors import ConfigError
from psfleet_launch.job.job_plan import Job, Member

__all__ = ["MachinePlacement"]


class MachinePlacement:
    """The machines of a job and what each runs.

    Args:
        machines: Their names, in order.

    Raises:
        ConfigError: There is no machine, or just one and servers have standbys.
    """

    def __init__(self, job: Job, machines: Sequence[str]) -> None:
        if not machines:
            raise ConfigError("there is no machine to run on; name some")
        if job.request.replicas and len(machines) < 2:
            raise ConfigError(
                "--replicas 1 needs two machines, since a standby is not on the machine of its server; "
                f"there is only {machines[0]!r}"
            )
        self._machines = list(machines)
        self._where: dict[Member, str] = {}
        self._put(job.servers)
        self._put(job.workers)

    def __getitem__(self, member: Member) -> str:
        return self._where[member]

    def __contains__(self, member: Member) -> bool:
        return member in self._where

    def on(self, machine: str) -> list[Member]:
        """The members of a machine: servers first, by rank."""
        return sorted(member for member, where in self._where.items() if where == machine)

    def put_standby(self, standby: Member, allowed: Collection[str]) -> str:
        """Place a standby on the allowed machine that has the fewest servers."""
        load = self._load("server")
        self._where[standby] = min(
            (machine for machine in self._machines if machine in allowed),
            key=lambda machine: load[machine],
        )
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
        """Place seats, each rank where the fewest processes of its kind are."""
        chosen: dict[int, str] = {}
        for seat in seats:
            if seat.rank not in chosen:
                load = self._load("server" if seat.role == "server" else "")
                chosen[seat.rank] = min(self._machines, key=lambda machine: load[machine])
            self._where[seat] = chosen[seat.rank]

    def _load(self, role: str) -> Counter[str]:
        return Counter(where for seat, where in self._where.items() if role in ("", seat.role))
