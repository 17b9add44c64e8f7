"""Threads of the product that run one at a time, when the scheduler lets them: so a seed says all of a run.

What a thread would wait for, another process or time, gives control back. A process that dies takes its
threads with it, wherever they wait.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Protocol

import pytest

from psfleet.core.base import crash_points
from psfleet.core.base.errors import PsfleetError, ServerUnavailable
from psfleet_server.durability.log_shipping import LogShipping
from psfleet_server.engine import row_moves, server_scaling
from psfleet_server.rpc.endpoints import Peer

_CRASH_POINTS = frozenset(
    {
        *("append", "tear", "appended", "replay", "turned", "shortened"),
        *("opened", "sent", "filled", "prepared", "adopted", "promised", "decided"),
    }
)


class _Killed(BaseException):
    """The process of this thread has died."""


class Died(BaseException):
    """The process dies here, at a crash point of the product."""


class Strand:
    """One thread. `until` says whether what it waits for is there; `over`: it has ended."""

    _running: "Strand | None" = None

    def __init__(self, work: Callable[[], Any]) -> None:
        self.until: Callable[[], bool] = lambda: True
        self.over = False
        self.outcome: Any = None
        self._work = work
        self._error: Exception | None = None
        self._died: Died | None = None
        self._killed = False
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    @classmethod
    def wait(cls, until: Callable[[], bool]) -> None:
        """Called by a thread: let others run until that holds."""
        self = cls._running
        assert self is not None
        self.until = until
        self._back.release()
        self._turn.acquire()
        if self._killed:
            raise _Killed

    def go_on(self) -> None:
        """Let it run until it waits, or ends; an error that ends it is raised by `result`."""
        Strand._running = self
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._back.acquire()
        Strand._running = None
        if self._died is not None:
            raise self._died
        if self._error is not None and not isinstance(self._error, PsfleetError):
            raise self._error

    def result(self) -> Any:
        """What its work came to."""
        if self._error is not None:
            raise self._error
        return self.outcome

    def kill(self) -> None:
        """End it where it waits."""
        self._killed = True
        if self._thread.ident is not None and not self.over:
            self.go_on()
            self._thread.join()

    def _run(self) -> None:
        try:
            self.outcome = self._work()
        except _Killed:
            pass
        except Died as died:  # whoever runs it hears of it at once
            self._died = died
        except Exception as error:  # the scheduler's thread raises it
            self._error = error
        self.over = True
        self._back.release()


class Caller(Protocol):
    """A process whose threads call others."""

    ticks: int

    def call(self, to: str, method: str, request: bytes, seconds: float) -> bytes:
        """The answer; raises what the other one raises."""

    def spawn(self, work: Callable[[], Any]) -> Strand:
        """One more thread."""


class _Link(Peer):
    """A `Peer` over the scheduler's network; the process is what proves itself."""

    def __init__(self, name: str, endpoint: str, access: Any) -> None:
        self.name, self._endpoint = name, endpoint
        self._process: Caller = access

    def call(self, method: str, request: bytes, seconds: float) -> bytes:
        try:
            return self._process.call(self._endpoint, method, request, seconds)
        except TimeoutError:
            raise ServerUnavailable(f"{self.name} does not answer") from None

    def close(self) -> None:
        pass


class _Pool:
    """The calls of a ThreadPoolExecutor, as strands of the process that the first argument leads to."""

    def __init__(self, workers: int, thread_name_prefix: str = "") -> None:
        self._strands: list[Strand] = []

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, _Killed):
            Strand.wait(lambda: all(strand.over for strand in self._strands))

    def map(self, work: Callable[[_Link], Any], links: Iterable[_Link]) -> Iterator[Any]:
        """All at once, and the results in order."""
        for link in links:
            self._strands.append(link._process.spawn(partial(work, link)))
        for strand in self._strands:
            Strand.wait(partial(getattr, strand, "over"))
            yield strand.result()


class _Unhurried:
    """A Throttle that takes no time."""

    def __init__(self, share: float, worked: object) -> None: ...

    def rest(self) -> None:
        pass


class Signal:
    """An Event whose `wait` lets a few ticks of its process pass."""

    def __init__(self, process: Caller, ticks: int) -> None:
        self._process, self._ticks, self._is_set = process, ticks, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        end = self._process.ticks + self._ticks
        Strand.wait(lambda: self._is_set or self._process.ticks >= end)
        return self._is_set


def _settle(feed: LogShipping, end: int, seconds: float | None = None) -> bool:
    Strand.wait(lambda: feed.is_settled(end))
    return True


def _end_process(code: int) -> NoReturn:
    raise Died


@contextmanager
def scheduled(dies_at: Callable[[str], bool]) -> Iterator[None]:
    """Within, moves of rows have the scheduler's network, threads, clock and crash points.

    Args:
        dies_at: Tells at each crash point of logs and moves whether the process that has its turn dies there.
    """

    def reach(point: str, last_act: Callable[[], object] | None = None) -> None:
        if point in _CRASH_POINTS and dies_at(point):
            if last_act is not None:
                last_act()
            raise Died

    with pytest.MonkeyPatch.context() as patch:
        for module in (server_scaling, row_moves):
            patch.setattr(module, "Peer", _Link)
        patch.setattr(server_scaling, "ThreadPoolExecutor", _Pool)
        patch.setattr(row_moves, "Throttle", _Unhurried)
        patch.setattr(os, "_exit", _end_process)
        patch.setattr(LogShipping, "settle", _settle)
        patch.setattr(crash_points, "reach", reach)
        patch.setattr(server_scaling, "_FOLLOW", 0.0)
        patch.setattr(server_scaling, "_AWAIT", 0.0)
        patch.setattr(server_scaling, "_COPIED", server_scaling._MOVED)
        yield
