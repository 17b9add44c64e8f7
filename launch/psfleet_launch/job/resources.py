"""Memory and processors of one machine, and the parts of them that each server and each worker may use."""

import os
import sys
from dataclasses import dataclass

_ROOM = 512 << 20  # bytes of a server while it takes calls, or of a launcher and an agent


@dataclass(frozen=True)
class Resources:
    """Cores, and memory in bytes."""

    cores: int = 0
    memory: int = 0

    @classmethod
    def of_this_machine(cls) -> "Resources":
        """Return the resources that processes may use here; other processes may be using some of them."""
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
        """Return these, with memory that suffices where a process that takes more is killed."""
        return Resources(self.cores, self.memory * 5 // 4 + _ROOM if self.memory else 0)

    def said(self, request: "Resources") -> str:
        """Return, for people, those of them that the request has."""
        cores = _cores(self.cores) if request.cores else ""
        memory = f"{self.memory / 2**30:.1f} GiB" if request.memory else ""
        return " and ".join(filter(None, (cores, memory)))

    def __str__(self) -> str:
        return self.said(self)


BOUNDLESS = Resources(sys.maxsize, sys.maxsize)


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"
