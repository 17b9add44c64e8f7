"""Changes of the number of servers of a running job: the rule of `--servers 2..8`, and the launcher's part.

The rule requests as many servers as would be used by 60 %. It requests more servers when tables nearly fill
the memory of a server, or when all processors were busy for a minute. It requests fewer servers when less
than 25 % of memory and processors were used for a minute.

The launcher and server 0 communicate by files in the folder of the job's logs
(psfleet.core.base.scaling_files):

    scale.json       user or rule    asks for a number of servers
    scale.ready      launcher        has started the new servers, and lists all endpoints
    scale.promised   server 0        has moved the rows at a collective, and every server holds its part
    scale.done       launcher        decides: these are the servers now, or the change is given up

The launcher decides, because it starts every process. A process that is started after the decision reads
the new servers from scale.done, so it does not use rows from before the move. A process that takes a
server's place during the move has rows from before, so the move is given up then. Until the decision, new
servers do not belong to the job; if one of them dies, the move is given up too.
"""

import contextlib
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
"""Approximate seconds between two measurements."""

_MINUTE = 60.0
_FULL, _LITTLE, _WANTED = 0.8, 0.25, 0.6  # used fractions: ask for more, ask for fewer, aim at
_LOOKS = 3
"""Number of consecutive measurements with memory above `_FULL` before servers are added. A single one may
be caused by a move, which needs memory for a short time."""


@dataclass(frozen=True)
class ServerUsage:
    """Memory and processor time of a job's servers at one time.

    Attributes:
        at: Time of the measurement, in seconds of any clock.
        memory: Used fraction of the memory for tables (--server-memory) on the fullest server, or 0 without
            a limit.
        cpu: CPU seconds that all servers together have used since their start.
    """

    at: float
    servers: int
    memory: float
    cpu: float


@dataclass(frozen=True)
class WantedServers:
    """Number of servers that the rule requests, with the reason in words."""

    servers: int
    why: str


def wanted(usages: Sequence[ServerUsage], count: ServerCount, cores: int) -> WantedServers | None:
    """Return the number of servers that the job should have, or None to keep the present number.

    Args:
        usages: Measurements, oldest first.
    """
    same = _of_last_number(usages)
    if len(same) < _LOOKS:
        return None
    servers = same[-1].servers
    full = min(usage.memory for usage in same[-_LOOKS:])
    if full > _FULL:
        why = f"tables take {full:.0%} of what --server-memory leaves them"
        return _more(servers, full, count, why)
    start = max(
        (n for n, earlier in enumerate(same) if earlier.at <= same[-1].at - _MINUTE), default=None
    )
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
    """Return the measurements since the number of servers last changed."""
    same: list[ServerUsage] = []
    for usage in reversed(usages):
        if usage.servers != usages[-1].servers:
            break
        same.insert(0, usage)
    return same


def _busy(usages: Sequence[ServerUsage], cores: int) -> list[float]:
    """Return the fraction of all cores that was busy in each interval between two measurements."""
    return [
        max(now.cpu - before.cpu, 0.0) / (now.at - before.at) / (now.servers * cores)
        for before, now in itertools.pairwise(usages)
    ]


def _more(servers: int, use: float, count: ServerCount, why: str) -> WantedServers | None:
    servers_wanted = min(math.ceil(servers * use / _WANTED), count.most)
    return WantedServers(servers_wanted, why) if servers_wanted > servers else None


@dataclass
class ScalingStep:
    """Actions for the job runner after the files were read. Empty if there is nothing to do.

    Attributes:
        start: New servers to start.
        standbys: Standbys of the future servers to start.
        given_up: New servers and standbys that will never belong to the job, because the move was given up.
        end: Members of `given_up` that are running and must be ended.
        servers: Servers of the job from now on, or None if they do not change in this step.
        endpoints: Endpoints of the future servers, in order of rank.
        said: Line for the user, or "".
    """

    start: tuple[Member, ...] = ()
    standbys: tuple[Member, ...] = ()
    given_up: tuple[Member, ...] = ()
    end: tuple[Member, ...] = ()
    servers: tuple[Member, ...] | None = None
    endpoints: tuple[str, ...] = ()
    said: str = ""


class ScalingRequests:
    """Handles requests for another number of servers, one after the other, in the launcher's main thread.

    Args:
        refusal: Function that returns why the job cannot have a number of servers, or "" if it can.
        asked: Function that returns the endpoint that a new server should listen on, given its rank.
        standbys: Function that returns the standbys to start before a move to a number of servers.

    Attributes:
        under_way: True while a request is being handled and its result is not known yet.
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
        self._number = 0  # number of the last request that was begun
        self._servers = 0  # number of servers that it asks for
        self.under_way = False
        self._told: tuple[
            str, ...
        ] = ()  # endpoints of the future servers, as written to scale.ready
        self._why = ""  # reason to give the request up, kept until it could be written
        self._new: dict[Member, str] = {}  # endpoint of each new server, or "" until it is ready
        self._prepared: set[Member] = set()  # standbys of the future servers
        self._ended: set[Member] = set()

    def is_new(self, member: Member) -> bool:
        """Return whether the member is a new server or standby that does not belong to the job yet."""
        return member in self._new or member in self._prepared

    @property
    def starts(self) -> bool:
        """True while new servers are being started."""
        return not all(self._new.values())

    @property
    def ready(self) -> set[Member]:
        """New servers that are ready but do not belong to the job yet."""
        return {
            member
            for member, endpoint in self._new.items()
            if endpoint and member not in self._ended
        }

    def endpoints(self, present: Sequence[str]) -> list[str]:
        """Return the endpoints that a new server is told, in order of rank: of the present servers, then of
        all servers that the present request adds, including the new server.

        A new server that is not ready yet is listed with the endpoint that it should listen on.
        """
        return [
            *present,
            *(endpoint or self._asked(new.rank) for new, endpoint in self._new.items()),
        ]

    def take(self, event: Event) -> None:
        """Record that a new server is ready or has ended. Other events are ignored."""
        match event:
            case ServerReady(member, endpoint) if member in self._new:
                self._new[member] = endpoint
            case ProcessExited(member):
                self._ended.add(member)

    def step(self, present: Sequence[str]) -> ScalingStep:
        """Read the files, write the launcher's files, and return the actions to take.

        Raises:
            OSError: A file cannot be written, for example on a full disk. Call again later.
        """
        if not self.under_way:
            return self._begin(present)
        if self._why:
            return self.give_up(self._why, present)
        if not self._told:
            return self._wait_for_servers(present)
        return self._wait_for_promise(present)

    def give_up(self, why: str, present: Sequence[str]) -> ScalingStep:
        """Give up the present request, so that the job keeps its servers. Do nothing if there is no
        undecided request.
        """
        if not self.under_way:
            return ScalingStep()
        # Store the reason before writing the file. If the disk is full, `step` is called again, and must
        # then give up the request instead of deciding for the move.
        self._why = why
        return self._over(self._refused(self._number, why, present))

    def _begin(self, present: Sequence[str]) -> ScalingStep:
        number, servers = read_scale(self._folder)
        if number <= self._number:
            return ScalingStep()
        refused = self._refusal(servers)
        if refused or servers == len(present):
            step = self._refused(number, refused, present)
            # Only now: if the file cannot be written, the next step begins with the request again.
            self._number = number
            return step
        self._number, self._servers, self.under_way = number, servers, True
        self._new = {Member("server", rank): "" for rank in range(len(present), servers)}
        if self._new:
            return ScalingStep(start=tuple(self._new))
        return self._wait_for_servers(present)

    def _refused(self, number: int, why: str, present: Sequence[str]) -> ScalingStep:
        write_unscaled(self._folder, number, present, why)
        return ScalingStep(said=f"the number of servers stays as it is: {why}" if why else "")

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
            return self._tell([*present, *self._new.values()][: self._servers])
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
        # The file is the decision: the job has its old servers until the file exists, and the new servers
        # from then on. So this object must not change before it is certain whether the file exists.
        try:
            write_scaled(self._folder, Scaled(number, endpoints, number))
        except OSError:
            if (
                read_scaled(self._folder).generation != number
            ):  # it was written in spite of the error
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
            # The decision is made: an error must not hide it from the caller. The numbers in the files tell
            # that they belong to a request that is over.
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()
        return step
