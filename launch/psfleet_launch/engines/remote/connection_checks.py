"""Whether every machine can connect to a server, asked before the server counts as ready. Pure.

Without this check workers behind a firewall would try for minutes, and their error would name no machine.
Only the first start of a rank is checked: later the network has shown that it works, and an interruption
is no reason to end the job.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.job_events import ServerReady, ServerUnreachable

__all__ = ["ConnectionChecks"]


@dataclass
class _Check:
    """A check under way; `missing`: machines that have not answered."""

    ready: ServerReady
    host: str
    missing: set[str]


class ConnectionChecks:
    """The checks of one job."""

    def __init__(self) -> None:
        self._ranks: set[int] = set()
        self._checks: dict[str, _Check] = {}  # by endpoint

    def begin(self, ready: ServerReady, host: str, machines: Iterable[str]) -> bool:
        """A server listens; whether these machines must connect to it before it counts as ready.

        Args:
            host: Its machine.
        """
        if ready.member.rank in self._ranks:
            return False
        self._ranks.add(ready.member.rank)
        self._checks[ready.endpoint] = _Check(ready, host, set(machines))
        return True

    def answered(
        self, machine: str, endpoint: str, error: str
    ) -> Iterator[ServerReady | ServerUnreachable]:
        """A machine has tried; `error` is empty if it has connected."""
        check = self._checks.get(endpoint)
        if check is None:
            return
        if error:
            del self._checks[endpoint]
            yield ServerUnreachable(check.ready.member, _advice(machine, check, error))
            return
        check.missing.discard(machine)
        if not check.missing:
            yield self._checks.pop(endpoint).ready

    def lose(self, machine: str) -> Iterator[ServerReady | ServerUnreachable]:
        """The machine is gone: nobody waits for its answers."""
        for endpoint in list(self._checks):
            yield from self.answered(machine, endpoint, "")

    def forget(self, member: Member) -> None:
        """Its process has ended."""
        self._checks = {
            where: one for where, one in self._checks.items() if one.ready.member != member
        }


def _advice(machine: str, check: _Check, error: str) -> str:
    member, endpoint = check.ready.member, check.ready.endpoint
    return (
        f"host {machine} cannot connect to {member} on host {check.host} at {endpoint} ({error}); "
        f"let firewalls pass TCP from {machine} to the ports of servers on {check.host} (--port)"
    )
