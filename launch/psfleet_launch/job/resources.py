"""What each server and each worker may use of its machine, as the user asks for it."""

import os
import sys
from dataclasses import dataclass

from psfleet.settings.declaration import setting
from psfleet.settings.kinds import BYTES

__all__ = ["BOUNDLESS", "Resources", "RoleSettings"]


_ROOM = 512 << 20  # bytes of a server while it takes calls, or of a launcher and an agent


@dataclass(frozen=True)
class RoleSettings:
    """Resources and restarts of each role."""

    server_cores: int = setting(
        0,
        "Cores of each server, for its place on machines and its threads; 0: it needs none of its own",
        names="--server-cores servers.cores",
        least=0,
    )
    worker_cores: int = setting(
        0,
        "Cores of each worker, for its place on machines and its threads; 0: workers share the cores of "
        "their machine",
        names="--worker-cores workers.cores",
        least=0,
    )
    worker_memory: int = setting(
        0,
        "Memory of each worker, for its place on machines, as in 8G; containers have it as their limit",
        BYTES,
        names="--worker-memory workers.memory",
        metavar="SIZE",
        least=0,
    )
    server_restarts: int = setting(
        5,
        "How often to restart each server that dies: from its log, or with durability snapshot the whole job",
        names="--restart-servers servers.restarts",
        least=0,
    )


@dataclass(frozen=True)
class Resources:
    """Cores, and memory in bytes."""

    cores: int = 0
    memory: int = 0

    @classmethod
    def of_this_machine(cls) -> "Resources":
        """What processes may use here; other processes may be using some of it."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(len(os.sched_getaffinity(0)), memory)

    def __add__(self, other: "Resources") -> "Resources":
        return Resources(self.cores + other.cores, self.memory + other.memory)

    def __sub__(self, other: "Resources") -> "Resources":
        return Resources(self.cores - other.cores, self.memory - other.memory)

    def __le__(self, other: "Resources") -> bool:
        return self.cores <= other.cores and self.memory <= other.memory

    @property
    def confined(self) -> "Resources":
        """These, with memory that suffices where whoever takes more is killed."""
        return Resources(self.cores, self.memory * 5 // 4 + _ROOM if self.memory else 0)

    def said(self, asked: "Resources") -> str:
        """Those of them that are asked for, for people."""
        cores = _cores(self.cores) if asked.cores else ""
        memory = f"{self.memory / 2**30:.1f} GiB" if asked.memory else ""
        return " and ".join(filter(None, (cores, memory)))

    def __str__(self) -> str:
        return self.said(self)


BOUNDLESS = Resources(sys.maxsize, sys.maxsize)


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"
