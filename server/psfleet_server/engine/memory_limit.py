"""Limit on the memory of a server's tables, computed from the process limit PSFLEET_MEMORY.

memory of the process
|-- program --|-- tables and waiting pushes ---------------|-- calls and compiler --|
  resident()    table_limit()                                max(memory / 8, 96 MiB)
"""

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.memory import resident

_OTHERS = 96 << 20  # least bytes for calls under way and for the compiler of kernels
_PART = 8  # divisor: calls and compiler get at least an eighth of the memory
_LEAST = 16 << 20  # least bytes for tables


def spare(memory: int) -> int:
    """Return the number of bytes beyond `table_limit` that tables may take while a snapshot is loaded.

    They come from the reserve for calls.
    """
    return _for_calls(memory) // 2


def _for_calls(memory: int) -> int:
    return max(memory // _PART, _OTHERS)


def table_limit(memory: int) -> int | None:
    """Return the maximum number of bytes for tables and for pushes that wait for their round.

    Call it before the server has a table, because it subtracts the memory that the program takes now. It also
    subtracts a reserve for running calls and for the compiler of kernels, which runs when a server without
    cached kernels creates its first table.

    Args:
        memory: Bytes that the process may take in all, or 0 for no limit.

    Returns:
        Bytes, or None for no limit.

    Raises:
        ConfigError: Less than 16 MiB would be left for tables.
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
