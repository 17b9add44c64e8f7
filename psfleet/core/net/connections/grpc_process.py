"""Tunes malloc and gRPC for a process. Must run before gRPC is imported and before a second thread starts.

Calls allocate and free messages of megabytes. By default, glibc's malloc takes fresh pages from the kernel
for each and returns them at once: 16,385 page faults for 64 MB, and 0.49 CPU seconds per GB against 0.055
with reused memory (measured with grpcio 1.85). The settings below therefore use one arena, no mmap for
large blocks, and a high threshold before memory is returned. The price is that memory once used stays with
the process. `mallopt` affects only threads that start later, hence "before".
"""

import ctypes
import importlib.metadata
import os
import sys

_MALLOC = {  # glibc's malloc.h
    -8: 1,  # M_ARENA_MAX: buffers freed by one thread are reused by another
    -4: 0,  # M_MMAP_MAX: large blocks come from the heap too
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: keep freed memory (an int, so 2 GiB at most)
    -2: 64 << 20,  # M_TOP_PAD: grow the heap in steps of 64 MB
}

# gRPC's event engine costs 16-26 % more CPU for messages up to 4 MB. The switch is undocumented, so it is
# used only with the release that it was measured with.
_MEASURED_GRPC = "1.85."
_EXPERIMENTS = "-event_engine_client,-event_engine_listener"


def prepare(verbosity: str = "NONE") -> None:
    """Tune malloc and gRPC for this process. Settings that the user's environment already makes are kept.

    Args:
        verbosity: Lowest severity of the lines that gRPC itself writes to standard error.
    """
    if not _malloc_is_settled():
        _tune_malloc()
    # An error in a call is raised to the caller, so gRPC's own log lines would only repeat it.
    os.environ.setdefault("GRPC_VERBOSITY", verbosity)
    if importlib.metadata.version("grpcio").startswith(_MEASURED_GRPC):
        os.environ.setdefault("GRPC_EXPERIMENTS", _EXPERIMENTS)


def _malloc_is_settled() -> bool:
    """Return whether malloc must be left alone: the user tunes or replaces it, or this is not Linux."""
    names = [
        name
        for name in os.environ
        if name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD")
    ]
    return bool(names) or not sys.platform.startswith("linux")


def _tune_malloc() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library than glibc
        return
    for parameter, value in _MALLOC.items():
        mallopt(parameter, value)
