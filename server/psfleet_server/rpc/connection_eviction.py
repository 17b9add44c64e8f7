"""Which connections of strangers to close, so that members of the fleet find room. Pure.

A connection is a stranger's until it has proved itself. Members do that within milliseconds, so
many strangers at a time are an attack, and only some of them can be kept: few of each address, and
of many addresses as many of each. Those that have not even spoken go first, then the oldest.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Network

__all__ = ["UnauthenticatedConnection", "network_of", "surplus"]


@dataclass(frozen=True, slots=True)
class UnauthenticatedConnection:
    """A connection that has not proved itself.

    Attributes:
        inode: Number of its socket.
        address: Where it comes from, as `network_of` says it.
        since: When it was first seen.
        silent: It has sent nothing yet.
    """

    inode: int
    address: str
    since: float
    silent: bool


def network_of(host: str) -> str:
    """What counts as one address: an IPv4 address, or the /64 that one IPv6 host has for itself."""
    if ":" not in host:
        return host
    return str(IPv6Network(f"{host.partition('%')[0]}/64", strict=False))


def surplus(
    strangers: Iterable[UnauthenticatedConnection], each: int, in_all: int
) -> list[UnauthenticatedConnection]:
    """Those to close: afterwards an address has at most `each`, and all together have `in_all`."""
    groups: defaultdict[str, list[UnauthenticatedConnection]] = defaultdict(list)
    for stranger in sorted(strangers, key=lambda one: (not one.silent, one.since)):
        groups[stranger.address].append(stranger)
    most = _level([len(group) for group in groups.values()], each, in_all)
    closing = [one for group in groups.values() for one in group[: max(len(group) - most, 0)]]
    kept = [one for group in groups.values() for one in group[max(len(group) - most, 0) :]]
    kept.sort(key=lambda one: (not one.silent, one.since))
    return closing + kept[: max(len(kept) - in_all, 0)]


def _level(sizes: Sequence[int], each: int, in_all: int) -> int:
    """The most that each group may have, at least 1, so that all together have at most `in_all`."""
    level = each
    while level > 1 and sum(min(size, level) for size in sizes) > in_all:
        level -= 1
    return level
