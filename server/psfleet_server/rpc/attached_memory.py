"""Memories that workers on this host share with this server, and their end.

A worker that dies cannot say so. A pidfd of each worker tells: what it shared is let go at once.
"""

import contextlib
import os
import select
import threading
from dataclasses import dataclass, field

from psfleet.core.base.errors import LaneLost
from psfleet.core.base.threads import ServiceThread
from psfleet.core.net.shared_memory import MemoryHandle, SharedMemory
from psfleet.core.net.v1.frame_pb2 import Header
from psfleet_server.rpc.call_layout import CallLayout, CallPlan

_MOST_LAYOUTS = 32


@dataclass(slots=True)
class _AttachedRegion:
    """One worker's memory.

    Attributes:
        process: Pidfd of the worker, or -1.
        turn: The last call in it.
        layouts: Layouts parsed for earlier calls, by their bytes.
    """

    memory: SharedMemory
    incarnation: int
    generation: int
    process: int
    turn: int = 0
    layouts: dict[bytes, CallLayout] = field(default_factory=dict)


class AttachedMemory:
    """At most one memory for each worker. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: dict[int, _AttachedRegion] = {}
        self._deaths = select.epoll()
        self._end, self._ending = os.pipe()
        self._thread = ServiceThread(self._watch, "lanes")

    def __len__(self) -> int:
        return len(self._shared)

    def start(self) -> None:
        """Begin to watch for workers that die."""
        self._deaths.register(self._end, select.EPOLLIN | select.EPOLLHUP)
        self._thread.start()

    def stop(self) -> None:
        """Let go of everything."""
        os.close(self._ending)
        self._thread.join()
        os.close(self._end)
        for worker in list(self._shared):
            self.drop(worker)
        self._deaths.close()

    def attach(self, worker: int, incarnation: int, generation: int, offer: MemoryHandle) -> bool:
        """Share the memory in place of the worker's earlier one; False: it cannot be reached."""
        memory = SharedMemory.open(offer)
        if memory is None:
            return False
        process = _pidfd(offer.pid)
        with self._lock:
            self._drop(worker)
            self._shared[worker] = _AttachedRegion(memory, incarnation, generation, process)
            if process >= 0:
                self._deaths.register(process, select.EPOLLIN)
        return True

    def known(self, header: Header, layout: bytes) -> CallLayout | None:
        """Return the layout parsed for an earlier call with these bytes; None: there was none.

        The call is then taken, as by `of`, which says what it raises.
        """
        lane = header.lane
        with self._lock:
            shared = self._shared.get(header.worker)
            if shared is None or shared.generation != lane.generation or lane.turn <= shared.turn:
                return None
            call = shared.layouts.get(layout)
            if call is not None:
                shared.turn = lane.turn
            return call

    def of(self, header: Header) -> SharedMemory | None:
        """The memory in which a call's tensors lie; None: they are in its message.

        Raises:
            LaneLost: The memory is not here, or the call is not newer than the last one in it: what
                its places hold now may belong to another call.
        """
        if not header.HasField("lane"):
            return None
        lane = header.lane
        generation, turn = lane.generation, lane.turn
        with self._lock:
            shared = self._shared.get(header.worker)
            if shared is None or shared.generation != generation:
                raise LaneLost(
                    f"worker {header.worker} shares no memory of generation "
                    f"{generation:#x} with this server; send the tensors"
                )
            if turn <= shared.turn:
                raise LaneLost(
                    f"call {turn} in the memory of worker {header.worker} "
                    f"comes after call {shared.turn}; send the tensors"
                )
            shared.turn = turn
            return shared.memory

    def plan(self, worker: int, generation: int, layout: bytes) -> CallPlan | None:
        """Return the plan of calls with these bytes, if there is one; the call is not taken yet."""
        shared = self._shared.get(worker)
        if shared is None or shared.generation != generation:
            return None
        call = shared.layouts.get(layout)
        return None if call is None else call.plan

    def claim(self, worker: int, generation: int, turn: int) -> bool:
        """Take a call; False: `of` would refuse it, as it says there."""
        with self._lock:
            shared = self._shared.get(worker)
            if shared is None or shared.generation != generation or turn <= shared.turn:
                return False
            shared.turn = turn
            return True

    def keep(self, header: Header, layout: bytes, call: CallLayout) -> None:
        """Calls in the memory of this one may come with the same bytes again."""
        with self._lock:
            shared = self._shared.get(header.worker)
            if shared is not None and shared.generation == header.lane.generation:
                if len(shared.layouts) >= _MOST_LAYOUTS:
                    shared.layouts.clear()
                shared.layouts[layout] = call

    def forget_layouts(self) -> None:
        """Tables have other shapes here: calls with the same bytes are laid out anew."""
        with self._lock:
            for shared in self._shared.values():
                shared.layouts.clear()

    def drop(self, worker: int, before: int | None = None) -> None:
        """The worker (in its incarnations before `before`) shares nothing any more.

        Calls under way keep the memory until they end.
        """
        with self._lock:
            shared = self._shared.get(worker)
            if shared is not None and (before is None or shared.incarnation < before):
                self._drop(worker)

    def _drop(self, worker: int) -> None:
        shared = self._shared.pop(worker, None)
        if shared is not None and shared.process >= 0:
            self._deaths.unregister(shared.process)
            os.close(shared.process)

    def _watch(self) -> None:
        while True:
            descriptors = {descriptor for descriptor, _ in self._deaths.poll()}
            if self._end in descriptors:
                return
            self._drop_all(descriptors)

    def _drop_all(self, processes: set[int]) -> None:
        """These workers have died. A function of its own: its names must not keep what they shared."""
        with self._lock:
            for worker, shared in list(self._shared.items()):
                if shared.process in processes:
                    self._drop(worker)


def _pidfd(pid: int) -> int:
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return -1
