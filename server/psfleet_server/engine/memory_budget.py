"""Limit on the part of a server's memory that its tables may take."""

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.memory import resident

_OTHERS = 96 << 20  # for calls under way and for the compiler of kernels, at least
_PART = 8  # ... and this part of the whole
_LEAST = 16 << 20


def spare(memory: int) -> int:
    """Return the bytes of the reserve for calls that tables may take while they are loaded."""
    return _for_calls(memory) // 2


def _for_calls(memory: int) -> int:
    return max(memory // _PART, _OTHERS)


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
    limit = memory - now - _for_calls(memory)
    if limit < _LEAST:
        raise ConfigError(
            f"PSFLEET_MEMORY allows this server {memory >> 20} MiB; the program itself takes "
            f"{now >> 20} MiB and calls under way {_OTHERS >> 20} MiB or more. Allow it at least "
            f"{(now + _OTHERS + _LEAST >> 20) + 32} MiB"
        )
    return limit
