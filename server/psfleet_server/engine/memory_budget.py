"""How much of a server's memory its tables may take."""

import resource

from psfleet.errors import ConfigError

__all__ = ["resident", "table_limit"]

_OTHERS = 96 << 20  # for calls under way and for the compiler of kernels, at least
_PART = 8  # ... and this part of the whole
_LEAST = 16 << 20


def resident() -> int:
    """Bytes of memory that this process has now."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def table_limit(memory: int) -> int | None:
    """Bytes for tables and held pushes of a server that may take `memory` in all; None: no limit.

    What the program takes before it has a table is left out, and so is an eighth, 96 MiB at least, for
    calls under way and for the compiler, which is at work when a cold server makes its first table.

    Raises:
        ConfigError: Nothing would be left.
    """
    if not memory:
        return None
    now = resident()
    left = memory - now - max(memory // _PART, _OTHERS)
    if left < _LEAST:
        raise ConfigError(
            f"PSFLEET_MEMORY allows this server {memory >> 20} MiB; the program itself takes "
            f"{now >> 20} MiB and calls under way {_OTHERS >> 20} MiB or more. Allow it at least "
            f"{(now + _OTHERS + _LEAST >> 20) + 32} MiB"
        )
    return left
