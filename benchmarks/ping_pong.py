"""Minimum cost of a call: two processes that only wake each other in turn.

A pull or push costs this and psfleet's own work. CPU is that of both processes.
"""

import os
import resource
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

from reporting import Report, arguments, finish

MESSAGE = bytes(200)  # about what the request of a small step has


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    trips = options.steps or (2_000 if options.short else 20_000)
    report = Report("ping_pong", "Round trips between two processes")
    for name, ends in (("eventfd", _eventfds), ("unix socket, 200 bytes", _sockets)):
        durations = [round_trips(*ends(), trips) for _ in range(options.runs)]
        cpu, wall = [*map(statistics.median, zip(*durations, strict=True))]
        report.rows.append(
            {
                "over": name,
                "CPU us / round trip": cpu,
                "round trips / s": 1e6 / wall,
                "largest CPU us": max(cpu for cpu, _ in durations),
                "runs": options.runs,
            }
        )
    finish(report, options.json)


def round_trips(
    ask: Callable[[], Any], reply: Callable[[], Any], trips: int
) -> tuple[float, float]:
    """Return the CPU time of both processes and the wall-clock time of a round trip, in us."""
    before, began = _cpu(resource.RUSAGE_SELF), time.perf_counter()
    spent = _cpu(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if not child:
        for _ in range(trips):
            reply()
        os._exit(0)
    for _ in range(trips):
        ask()
    wall = time.perf_counter() - began
    os.waitpid(child, 0)
    cpu = _cpu(resource.RUSAGE_SELF) - before + _cpu(resource.RUSAGE_CHILDREN) - spent
    return cpu / trips * 1e6, wall / trips * 1e6


def _eventfds() -> tuple[Callable[[], Any], Callable[[], Any]]:
    forward, back = os.eventfd(0), os.eventfd(0)
    return (
        lambda: (os.eventfd_write(forward, 1), os.eventfd_read(back)),
        lambda: (os.eventfd_read(forward), os.eventfd_write(back, 1)),
    )


def _sockets() -> tuple[Callable[[], Any], Callable[[], Any]]:
    here, far = socket.socketpair()
    buffer = bytearray(len(MESSAGE))
    return (
        lambda: (here.sendall(MESSAGE), here.recv_into(buffer)),
        lambda: (far.recv_into(buffer), far.sendall(MESSAGE)),
    )


def _cpu(of: int) -> float:
    used = resource.getrusage(of)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
