"""Shared memory of the workers on this host, mapped into this server: one memory per worker.

A worker offers a memory (`attach`). The tensors of its calls are then in that memory, and a message contains
only their offsets. Every call contains the memory's *generation*, a number that the worker chooses for each
new memory, and a *turn*, which rises with each call:

- another generation: the server has restarted, or the worker has made a new memory;
- a turn that is not newer: a delayed or repeated call, whose offsets may by now point at another call's
  tensors.

In both cases the server raises LaneLost, and the worker repeats the call with its tensors in the message.

A worker that dies cannot withdraw its memory. A thread watches a pidfd of each worker, and unmaps the memory
as soon as the process has ended. Running calls keep the memory until they end.
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
from psfleet_server.rpc.call_layout import CallLayout, CallPlan, CallPlanner, Plans

_MOST_LAYOUTS = 32  # layouts kept for each worker


@dataclass(slots=True)
class _AttachedRegion:
    """Memory that one worker shares.

    Attributes:
        memory: The mapped memory.
        incarnation: Number of the worker process that offered it.
        generation: Number of the memory, chosen by the worker.
        process: Pidfd of the worker, or -1 if the system has none.
        turn: Number of the last call in the memory.
        layouts: Layouts parsed for earlier calls, by the bytes of their segments.
        plans: Plans of earlier calls.
    """

    memory: SharedMemory
    incarnation: int
    generation: int
    process: int
    turn: int = 0
    layouts: dict[bytes, CallLayout] = field(default_factory=dict)
    plans: Plans = field(default_factory=dict)


class AttachedMemory:
    """Shared memories of all workers on this host. Any thread may call."""

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
        """Stop the thread and unmap all memories."""
        os.close(self._ending)
        self._thread.join()
        os.close(self._end)
        for worker in list(self._shared):
            self.drop(worker)
        self._deaths.close()

    def attach(self, worker: int, incarnation: int, generation: int, offer: MemoryHandle) -> bool:
        """Map a worker's memory, in place of an earlier one of the same worker.

        Args:
            worker: The worker.
            incarnation: Number of the worker's process.
            generation: Number of the memory, chosen by the worker.
            offer: Handle with which the memory is opened.

        Returns:
            False if this process cannot open the memory. The worker then sends tensors in messages.
        """
        memory = SharedMemory.open(offer)
        if memory is None:
            return False
        process = _pidfd(offer.pid)
        with self._lock:  # for both steps, so that no call finds the worker without a memory
            self._drop(worker)
            self._shared[worker] = _AttachedRegion(memory, incarnation, generation, process)
            if process >= 0:
                self._deaths.register(process, select.EPOLLIN)
        return True

    def known(self, header: Header, layout: bytes) -> CallLayout | None:
        """Return the layout of an earlier call with the same bytes, or None if there is none.

        If there is a layout, the call's turn (its number in the shared memory) is noted. If there is none,
        nothing has changed, and the caller continues with `of`, which also raises the errors.
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
        """Return the memory with a call's tensors, and note the call's turn (its number in the memory).

        Returns None if the tensors are in the message.

        Raises:
            LaneLost: This server does not have the memory. Or the call is not newer than the last call in the
                memory, so its offsets may point at the tensors of another call.
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

    def plan(
        self, worker: int, generation: int, layout: bytes, planner: CallPlanner
    ) -> CallPlan | None:
        """Return the plan that carries out calls with these layout bytes by addresses, or None.

        The caller notes the call's turn (its number in the shared memory) with `claim`.
        """
        # Without the lock: dict.get is atomic, and `claim` checks again under the lock.
        shared = self._shared.get(worker)
        if shared is None or shared.generation != generation:
            return None
        return planner.plan(shared.plans, (layout, 0), shared.memory)

    def claim(self, worker: int, generation: int, turn: int) -> bool:
        """Note the turn (the call's number in the shared memory) of a call that `plan` has a plan for.

        Returns False if `of` would raise LaneLost for this call.
        """
        with self._lock:
            shared = self._shared.get(worker)
            if shared is None or shared.generation != generation or turn <= shared.turn:
                return False
            shared.turn = turn
            return True

    def keep(self, header: Header, layout: bytes, call: CallLayout) -> None:
        """Keep the layout of a call for later calls with the same bytes in the same memory."""
        with self._lock:
            shared = self._shared.get(header.worker)
            if shared is not None and shared.generation == header.lane.generation:
                if len(shared.layouts) >= _MOST_LAYOUTS:
                    shared.layouts.clear()
                shared.layouts[layout] = call

    def forget_layouts(self) -> None:
        """Drop all layouts and plans, because the tables have changed."""
        with self._lock:
            for shared in self._shared.values():
                shared.layouts.clear()
                shared.plans.clear()

    def drop(self, worker: int, before: int | None = None) -> None:
        """Unmap a worker's memory. Running calls keep the memory until they end.

        Args:
            worker: The worker.
            before: If given, only a memory of an earlier incarnation (worker process) than this one is
                unmapped.
        """
        with self._lock:
            shared = self._shared.get(worker)
            if shared is not None and (before is None or shared.incarnation < before):
                self._drop(worker)

    def _drop(self, worker: int) -> None:
        # The memory is unmapped with the last array in it, so a call that still uses it can go on.
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
        """Unmap the memory of workers that have died, given by their pidfds.

        This is a separate function, because a local name in the loop of `_watch` would keep the last memory
        mapped.
        """
        with self._lock:
            for worker, shared in list(self._shared.items()):
                if shared.process in processes:
                    self._drop(worker)


def _pidfd(pid: int) -> int:
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return -1
