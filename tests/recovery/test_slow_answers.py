"""A server on a busy host takes its time to answer to a new connection, and is reached all the same."""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime

SLOW = 1.0  # seconds from a connection to the first byte of the answer


def passed_on(source: socket.socket, target: socket.socket) -> None:
    """Whatever comes, until one of the two is closed."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class Busy:
    """Stands before a unix socket and passes nothing on in the first second of a connection."""

    def __init__(self, path: Path, behind: str) -> None:
        self.endpoint = f"unix:{path}"
        self._behind = behind
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self._sockets = [self._listening]
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    @contextlib.contextmanager
    def open(self) -> Iterator["Busy"]:
        """Within, connections are taken."""
        accepting = self._start(self._accept)
        try:
            yield self
        finally:
            self._over.set()
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in self._threads:
                thread.join()
            for each in self._sockets:
                each.close()

    def _start(self, work: Callable[..., None], *args: socket.socket) -> threading.Thread:
        thread = threading.Thread(target=work, args=args)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                front, _ = self._listening.accept()
                self._sockets.append(front)
                self._start(self._serve, front)

    def _serve(self, front: socket.socket) -> None:
        if self._over.wait(SLOW):
            return
        back = socket.socket(socket.AF_UNIX)
        self._sockets.append(back)
        with contextlib.suppress(OSError):  # its server has ended
            back.connect(self._behind.removeprefix("unix:"))
            self._start(passed_on, front, back)
            passed_on(back, front)


@pytest.mark.parametrize("place", ["first", "second"])
def test_a_slow_reply_is_waited_for(tmp_path: Path, place: str) -> None:
    """A worker whose connection is answered after a second registers, meets and leaves."""
    slow = 0 if place == "first" else 1
    with (
        LocalFleet(2, 1, in_process=True) as fleet,
        Busy(tmp_path / "busy.sock", fleet.endpoints[slow]).open() as busy,
    ):
        environment = fleet.environment(0)
        servers = list(environment.servers)
        servers[slow] = busy.endpoint
        began = time.monotonic()
        runtime = ClusterRuntime(dataclasses.replace(environment, servers=tuple(servers)), "sync")
        runtime.barrier()
        runtime.close()
        assert time.monotonic() - began >= SLOW
        assert fleet.wait() == [0, 0]
