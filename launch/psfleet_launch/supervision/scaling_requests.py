"""Another number of servers for a running job: the rule of `--servers 2..8`, and how it comes about.

The rule asks for so many that they would be used by three fifths: more when the memory of one is nearly
full, or their processors are busy for a minute; fewer when a quarter of both has been enough for a minute.

A request is a file in the folder of the job's logs. When the new servers are ready, another file tells
server 0 where they are. It moves the rows at the workers' next collective, has every server promise to hold
its part, and says so. Then the launcher decides, who starts every process: none that comes later goes on
with rows of before, and a move in which one has taken a server's place is given up. Until then a new server
is none of the job's, and its death gives the move up.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from psfleet.core.base.errors import FrameError
from psfleet.core.base.scaling_files import (
    SCALE_PROMISED,
    SCALE_READY,
    Scaled,
    read_promise,
    read_scale,
    read_scaled,
    write_scale_ready,
    write_scaled,
    write_unscaled,
)
from psfleet.core.base.settings.kinds import ServerCount
from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.job_events import Event, ProcessExited, ServerReady

EVERY = 5.0
"""Seconds between two looks, about."""

_MINUTE = 60.0
_FULL, _LITTLE, _WANTED = 0.8, 0.25, 0.6  # parts of what servers have
_LOOKS = 3  # at memory, so that what a move takes for a moment does not count


@dataclass(frozen=True)
class ServerUsage:
    """What all servers of a job use at one moment.

    Attributes:
        at: Seconds of any clock.
        servers: Number of servers.
        memory: Part of what --server-memory leaves its tables, of the one that uses most; 0 without a limit.
        cpu: Seconds of processors that they have had, together.
    """

    at: float
    servers: int
    memory: float
    cpu: float


@dataclass(frozen=True)
class WantedServers:
    """A number of servers, and why they are wanted."""

    servers: int
    why: str


def wanted(usages: Sequence[ServerUsage], count: ServerCount, cores: int) -> WantedServers | None:
    """Return what the job should have in place of what it has; None: nothing else.

    Args:
        usages: Figures, oldest first.
        count: The fewest servers and the most.
        cores: Cores of a server.
    """
    same = _of_last_number(usages)
    if len(same) < _LOOKS:
        return None
    servers = same[-1].servers
    full = min(usage.memory for usage in same[-_LOOKS:])
    if full > _FULL:
        why = f"tables take {full:.0%} of what --server-memory leaves them"
        return _more(servers, full, count, why)
    start = max((n for n, one in enumerate(same) if one.at <= same[-1].at - _MINUTE), default=None)
    if start is None:
        return None
    busy = _busy(same[start:], cores)
    if min(busy) > _FULL:
        mean = sum(busy) / len(busy)
        why = f"servers were busy for a minute, with {mean:.0%} of {cores} core(s) each"
        return _more(servers, mean, count, why)
    use = max(*busy, *(usage.memory for usage in same[start:]))
    fewer = max(math.ceil(servers * use / _WANTED), count)
    if use < _LITTLE and fewer < servers:
        return WantedServers(fewer, f"servers used {use:.0%} of what they have for a minute")
    return None


def _of_last_number(usages: Sequence[ServerUsage]) -> list[ServerUsage]:
    """The last figures, of as many servers as there are now."""
    same: list[ServerUsage] = []
    for usage in reversed(usages):
        if usage.servers != usages[-1].servers:
            break
        same.insert(0, usage)
    return same


def _busy(usages: Sequence[ServerUsage], cores: int) -> list[float]:
    """The part of their cores that servers have used between each two looks."""
    return [
        max(now.cpu - before.cpu, 0.0) / (now.at - before.at) / (now.servers * cores)
        for before, now in itertools.pairwise(usages)
    ]


def _more(servers: int, use: float, count: ServerCount, why: str) -> WantedServers | None:
    more = min(math.ceil(servers * use / _WANTED), count.most)
    return WantedServers(more, why) if more > servers else None


@dataclass
class ScalingStep:
    """What is to be done now.

    Attributes:
        start: New servers.
        standbys: Those of the servers that are going to be, at `endpoints`.
        given_up: New servers and standbys that are never going to be the job's.
        end: Those of them that run.
        servers: The job has these servers from now on; None: it has what it had.
        endpoints: Where servers are, or are going to be.
        said: A line for the user.
    """

    start: tuple[Member, ...] = ()
    standbys: tuple[Member, ...] = ()
    given_up: tuple[Member, ...] = ()
    end: tuple[Member, ...] = ()
    servers: tuple[Member, ...] | None = None
    endpoints: tuple[str, ...] = ()
    said: str = ""


class ScalingRequests:
    """Requests for another number of servers, one after the other.

    Args:
        folder: Of the job's logs.
        refusal: Says why the job cannot have so many servers; empty: it can.
        asked: Where a new server is asked to listen.
        standbys: Returns those to start for so many servers, before they hold their rows.

    Attributes:
        under_way: One has begun, and its outcome is not known yet.
    """

    def __init__(
        self,
        folder: Path,
        refusal: Callable[[int], str],
        asked: Callable[[int], str],
        standbys: Callable[[int], tuple[Member, ...]] = lambda servers: (),
    ) -> None:
        self._folder = folder
        self._refusal = refusal
        self._asked = asked
        self._standbys = standbys
        self._number = 0  # of the last request that was begun
        self.under_way = False
        self._told: tuple[str, ...] = ()  # where they are going to be, as server 0 knows
        self._why = ""  # it is given up
        self._new: dict[Member, str] = {}  # where they are; empty: not ready
        self._prepared: set[Member] = set()  # standbys
        self._ended: set[Member] = set()

    def is_new(self, member: Member) -> bool:
        """Return whether the member is a new server, or a standby, that is none of the job's yet."""
        return member in self._new or member in self._prepared

    @property
    def starts(self) -> bool:
        """Return whether a new server is being started."""
        return not all(self._new.values())

    @property
    def ready(self) -> set[Member]:
        """New servers that run and are none of the job's yet."""
        return {
            member for member, found in self._new.items() if found and member not in self._ended
        }

    def endpoints(self, present: Sequence[str]) -> list[str]:
        """Where the servers are going to be, for a new one."""
        return [*present, *(found or self._asked(new.rank) for new, found in self._new.items())]

    def take(self, event: Event) -> None:
        """Something has happened to a new server."""
        match event:
            case ServerReady(member, endpoint) if member in self._new:
                self._new[member] = endpoint
            case ProcessExited(member):
                self._ended.add(member)

    def step(self, present: Sequence[str]) -> ScalingStep:
        """Look at the files, for a job whose servers are there."""
        if not self.under_way:
            return self._begin(present)
        if self._why:
            return self.give_up(self._why, present)
        if not self._told:
            return self._wait_for_servers(present)
        return self._wait_for_promise(present)

    def give_up(self, why: str, present: Sequence[str]) -> ScalingStep:
        """Let the job keep its servers, unless another number of them is decided."""
        if not self.under_way:
            return ScalingStep()
        self._why = why  # also where it cannot be written yet
        return self._over(self._refused(why, present))

    def _begin(self, present: Sequence[str]) -> ScalingStep:
        number, servers = read_scale(self._folder)
        if number <= self._number:
            return ScalingStep()
        self._number = number
        if refused := self._refusal(servers):
            return self._refused(refused, present)
        if servers == len(present):
            write_unscaled(self._folder, number, present)
            return ScalingStep()
        self.under_way = True
        self._new = {Member("server", rank): "" for rank in range(len(present), servers)}
        step = ScalingStep(start=tuple(self._new))
        return step if self._new else self._tell(present[:servers])

    def _refused(self, why: str, present: Sequence[str]) -> ScalingStep:
        write_unscaled(self._folder, self._number, present, why)
        return ScalingStep(said=f"the number of servers stays as it is: {why}")

    def _tell(self, endpoints: Sequence[str]) -> ScalingStep:
        write_scale_ready(self._folder, self._number, endpoints)
        self._told = tuple(endpoints)
        standbys = self._standbys(len(endpoints))
        self._prepared = {*standbys}
        return ScalingStep(standbys=standbys, endpoints=self._told)

    def _wait_for_servers(self, present: Sequence[str]) -> ScalingStep:
        if self._ended:
            return self.give_up(
                f"{min(self._ended)} ended before it was ready; look at its log", present
            )
        if all(self._new.values()):
            return self._tell([*present, *self._new.values()])
        return ScalingStep()

    def _wait_for_promise(self, present: Sequence[str]) -> ScalingStep:
        try:
            number, why = read_promise(self._folder)
        except FrameError as error:
            return self.give_up(str(error), present)
        if number == self._number and why:
            return self.give_up(why, present)
        if self._ended:
            return self.give_up(
                f"{min(self._ended)} ended before rows had moved; look at its log", present
            )
        return self._decide() if number == self._number else ScalingStep()

    def _decide(self) -> ScalingStep:
        endpoints, number = self._told, self._number
        try:
            write_scaled(self._folder, Scaled(number, endpoints, number))
        except OSError:
            if read_scaled(self._folder).generation != number:  # it may be there all the same
                raise
        servers = tuple(Member("server", rank) for rank in range(len(endpoints)))
        self._new, self._prepared = {}, set()
        return self._over(
            ScalingStep(
                servers=servers, endpoints=endpoints, said=f"servers   {len(endpoints)} from now on"
            )
        )

    def _over(self, step: ScalingStep) -> ScalingStep:
        step.given_up = (*self._new, *self._prepared)
        step.end = tuple(member for member in step.given_up if member not in self._ended)
        self.under_way, self._told, self._why = False, (), ""
        self._new, self._prepared, self._ended = {}, set(), set()
        for name in (SCALE_READY, SCALE_PROMISED):
            (self._folder / name).unlink(missing_ok=True)
        return step
