"""Cores and memory: of a machine, or promised to a server or worker (--server-cores, --worker-memory,
...)."""

import os
import sys
from dataclasses import dataclass

from psfleet.core.base.panels.panel import counted

_ROOM = 512 << 20  # bytes that a server needs beside its tables, or a launcher and an agent need


@dataclass(frozen=True)
class Resources:
    """Number of cores, and bytes of memory."""

    cores: int = 0
    memory: int = 0

    @classmethod
    def of_this_machine(cls) -> "Resources":
        """Return the cores that this process may use, and the total memory of the machine."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(len(os.sched_getaffinity(0)), memory)

    def __add__(self, other: "Resources") -> "Resources":
        return Resources(self.cores + other.cores, self.memory + other.memory)

    def __sub__(self, other: "Resources") -> "Resources":
        return Resources(self.cores - other.cores, self.memory - other.memory)

    def __le__(self, other: "Resources") -> bool:
        return self.cores <= other.cores and self.memory <= other.memory

    @property
    def with_headroom(self) -> "Resources":
        """Return these resources with 25 % and 512 MiB more memory, for a container's limit.

        A container is killed when it uses more memory than its limit.
        """
        return Resources(self.cores, self.memory * 5 // 4 + _ROOM if self.memory else 0)

    def said(self, request: "Resources") -> str:
        """Return these resources in words, without those that are 0 in `request`."""
        cores = counted(self.cores, "core") if request.cores else ""
        memory = f"{self.memory / 2**30:.1f} GiB" if request.memory else ""
        return " and ".join(filter(None, (cores, memory)))

    def __str__(self) -> str:
        return self.said(self)


BOUNDLESS = Resources(sys.maxsize, sys.maxsize)
