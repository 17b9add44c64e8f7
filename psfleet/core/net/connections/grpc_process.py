"""Settings of a process that must precede the import of gRPC and its second thread.

Messages of megabytes come and go with every call. glibc's malloc gives each of them fresh pages
from the kernel and gives them back at once: 16,385 page faults for 64 MB, 0.49 CPU seconds per GB
against 0.055 when the memory is reused (measured with grpcio 1.85). So one arena, no mmap for large
blocks, and a high threshold before memory is returned. The price: memory that was used once stays
with the process. `mallopt` counts only for threads that start later, hence "before".
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

# gRPC's event engine costs 16-26 % more CPU for messages up to 4 MB. Switching it off is an
# undocumented setting, so it is used only in the release in which it was measured.
_MEASURED_GRPC = "1.85."
_EXPERIMENTS = "-event_engine_client,-event_engine_listener"


def prepare(verbosity: str = "NONE") -> None:
    """Tune malloc and gRPC for this process, unless the user has settled them.

    Args:
        verbosity: From which severity on gRPC writes its own lines to standard error.
    """
    if not _malloc_is_settled():
        _tune_malloc()
    # What goes wrong in a call reaches the caller as an error; gRPC's own lines would say it twice.
    os.environ.setdefault("GRPC_VERBOSITY", verbosity)
    if importlib.metadata.version("grpcio").startswith(_MEASURED_GRPC):
        os.environ.setdefault("GRPC_EXPERIMENTS", _EXPERIMENTS)


def _malloc_is_settled() -> bool:
    """Return whether the user tunes malloc, or has put another in its place."""
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
