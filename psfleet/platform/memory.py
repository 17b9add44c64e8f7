"""How much memory there is."""

import contextlib

__all__ = ["available_memory"]


def available_memory() -> int:
    """Bytes of memory that could be had without swapping; 0 if the kernel does not say."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        return next(
            (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0
        )
    return 0
