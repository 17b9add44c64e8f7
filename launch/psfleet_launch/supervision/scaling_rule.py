"""The rule of `--servers 2..8`: how many servers a job should have, from measured figures. Pure.

It asks for so many that they would be used by three fifths: more when the memory of one is nearly full, or
their processors are busy for a minute; fewer when a quarter of both has been enough for a minute.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from psfleet.settings.kinds import ServerCount

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
