"""Ordered work on a CUDA device: streams, events, and the pinned memory that copies to and from the host use.

A table has a `DeviceQueue`, whose calls look as if each was done before the next one. Copies go through
`Staging`, pinned buffers that all tables of the process share, and `DeviceBuffers` are working memory by
name.

Numba's streams also wait for the device's default stream, and that waits for them. So work that names no
stream is in order too, if slower.
"""
# mypy: disable-error-code="no-untyped-call,attr-defined,call-arg"

import math
import threading
import warnings
from functools import cache
from queue import SimpleQueue
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.cudadrv import driver as cuda_driver
from numpy.typing import DTypeLike, NDArray

from psfleet.core.engine.kernels.cache import forget_compiled
from psfleet.core.engine.kernels.device.cuda_arithmetic import SIMULATED
from psfleet.core.engine.kernels.initial_values import copy_over

_THREADS = 128  # of a block
_SIMULATED_THREADS = 2
_HALF = 1 << 22  # bytes of half a staging buffer
_STAGING = 4  # number of staging buffers of a process
# A push of few ids is a small grid, and none of a user's business.
warnings.filterwarnings("ignore", ".*Grid size .* low occupancy")
_launching = threading.Lock()  # the simulator runs one kernel at a time

if SIMULATED:
    from numba.cuda.simulator.kernel import BlockThread

    def _is_alive(thread: threading.Thread) -> bool:
        """Wait a moment before the answer, as the simulator asks in a loop, which took most of its time."""
        thread.join(0.001)
        return threading.Thread.is_alive(thread)

    BlockThread.is_alive = _is_alive  # type: ignore[assignment,method-assign]


class DeviceOperations:
    """Operations of a device. All but `finish` only add to a stream and return. Any thread may call."""

    def stream(self) -> Any:
        """Return a new stream. Its work is done in the order in which it was added."""
        return cuda.stream()

    def event(self) -> Any:
        """Return a new event, which is over until something records it."""
        return cuda.event() if SIMULATED else cuda.event(timing=False)

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Allocate `size` bytes of page-locked host memory, which the device copies by itself."""
        memory: NDArray[np.uint8] = cuda.pinned_array(size, np.uint8)
        return memory

    def record(self, event: Any, stream: Any) -> None:
        """Let the event be over as soon as all work is done that the stream has now."""
        cuda.current_context()
        event.record(stream)

    def wait(self, event: Any, stream: Any) -> None:
        """Let the later work of the stream wait for the event as it was recorded last."""
        cuda.current_context()
        event.wait(stream)

    def finish(self, event: Any) -> None:
        """Wait here until the event is over."""
        cuda.current_context()
        event.synchronize()

    def write(self, target: Any, source: Any, stream: Any) -> None:
        """Copy an array of the device, or a pinned one, over one of the device of the same size and dtype."""
        target.copy_to_device(source, stream=stream)

    def read(self, source: Any, target: NDArray[Any], stream: Any) -> None:
        """Copy an array of the device over a pinned one of the same size and dtype."""
        source.copy_to_host(target, stream=stream)

    def zero(self, target: Any, stream: Any) -> None:
        """Set an array of the device to 0."""
        cuda.current_context()
        cuda_driver.device_memset(target, 0, target.nbytes, stream)

    def launch(self, kernel: Any, blocks: int, threads: int, stream: Any, arguments: Any) -> None:
        """Run a kernel; compile it again if its compiled code on disk is damaged."""
        with _launching:
            start = kernel[blocks, threads, stream]
            try:
                start(*arguments)
            except Exception:
                if SIMULATED or kernel.overloads or not forget_compiled(kernel.py_func.__module__):
                    raise
                start(*arguments)


class _Half:
    """Half a staging buffer; `done` is over when the last copy from or to it is done."""

    def __init__(self, operations: DeviceOperations, size: int) -> None:
        self.memory = operations.pinned(size)
        self.done = operations.event()

    def array(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the first `count` elements of the half's memory."""
        return self.memory[: count * dtype.itemsize].view(dtype)


class Staging:
    """Pool of pinned buffers for copies between host and device. Any thread may call.

    A copy takes a buffer and waits if none is idle. A buffer has two halves: the host works on one while the
    device copies from or to the other.

    Args:
        operations: Operations of the device.
        buffers: Number of buffers.
        half: Bytes of half a buffer, a multiple of 8.

    Attributes:
        operations: Operations of the device.
    """

    def __init__(
        self, operations: DeviceOperations, buffers: int = _STAGING, half: int = _HALF
    ) -> None:
        self.operations = operations
        self._size = half
        self._idle: SimpleQueue[list[_Half]] = SimpleQueue()
        for _ in range(buffers):
            self._idle.put([_Half(operations, half), _Half(operations, half)])

    def send(self, target: Any, values: NDArray[Any], stream: Any) -> None:
        """Copy host memory to a flat array of the device. `values` may change when this returns."""
        count = self._size // values.itemsize
        halves = self._idle.get()
        try:
            for start in range(0, len(values), count):
                part = values[start : start + count]
                half = halves[start // count % 2]
                self.operations.finish(half.done)
                buffer = half.array(len(part), values.dtype)
                copy_over(buffer, part)
                there = target if len(part) == len(values) else target[start : start + len(part)]
                self.operations.write(there, buffer, stream)
                self.operations.record(half.done, stream)
        finally:
            self._idle.put(halves)

    def receive(self, source: Any, out: NDArray[Any], stream: Any) -> None:
        """Copy a flat array of the device to host memory, and wait for it."""
        count = self._size // out.itemsize
        halves = self._idle.get()
        try:
            for half in halves:
                self.operations.finish(half.done)
            for start in range(0, len(out) + count, count):
                if start < len(out):
                    length = min(count, len(out) - start)
                    half = halves[start // count % 2]
                    buffer = half.array(length, out.dtype)
                    there = source if length == len(out) else source[start : start + length]
                    self.operations.read(there, buffer, stream)
                    self.operations.record(half.done, stream)
                if start:
                    half, part = halves[(start // count - 1) % 2], out[start - count : start]
                    self.operations.finish(half.done)
                    copy_over(part, half.array(len(part), out.dtype))
        finally:
            self._idle.put(halves)


@cache
def shared_staging() -> Staging:
    """Return the staging buffers of this process."""
    return Staging(DeviceOperations())


class DeviceQueue:
    """Queue of a device's work for one table, as if one call came after the other.

    Not thread-safe.

    Kernels and copies to the host have a stream. Copies from the host have another one, so that the next
    batch arrives while kernels are at work on this one; events hold each of them back where it needs the
    other.

    Arrays of the device that it copies to or from the host are flat.
    """

    def __init__(self) -> None:
        self._staging = shared_staging()
        self._operations = self._staging.operations
        self._work, self._arrivals = self._operations.stream(), self._operations.stream()
        self._arrived, self._done = self._operations.event(), self._operations.event()

    def launch(self, kernel: Any, count: int, *arguments: Any) -> None:
        """Run a kernel for `count` items, which the kernel's loop divides among its threads."""
        if not count:
            return
        blocks, threads = -(-count // _THREADS), _THREADS
        if SIMULATED:  # each is a thread of Python: as many as may get in each other's way
            blocks, threads = 1, min(count, _SIMULATED_THREADS)
        self._operations.launch(kernel, blocks, threads, self._work, arguments)

    def copy(self, target: Any, source: Any) -> None:
        """Copy an array of the device over another one."""
        if target.size:
            self._operations.write(target, source, self._work)

    def zero(self, target: Any) -> None:
        """Set an array of the device to 0."""
        if target.size:
            self._operations.zero(target, self._work)

    def write(self, target: Any, values: NDArray[Any]) -> None:
        """Copy host memory over an array of the device; `values` may change when this returns."""
        self.mark(self._done)
        self.send(target, values, self._done)

    def send(self, target: Any, values: NDArray[Any], unused: Any) -> None:
        """Write as `write` does, but wait only for the event `unused`, not for all earlier work.

        The caller has marked `unused` behind the last work that reads or writes `target`.
        """
        if values.size:
            flat = np.ascontiguousarray(values).reshape(-1)
            self._operations.wait(unused, self._arrivals)
            self._staging.send(target, flat, self._arrivals)
            self._operations.record(self._arrived, self._arrivals)
            self._operations.wait(self._arrived, self._work)

    def read(self, source: Any) -> NDArray[Any]:
        """Return a copy of an array of the device, and wait for it."""
        out = np.empty(source.size, source.dtype)
        self.read_into(source, out)
        return out

    def read_into(self, source: Any, out: NDArray[Any]) -> None:
        """Copy an array of the device over contiguous host memory."""
        if out.size:
            self._staging.receive(source, out.reshape(-1), self._work)

    def event(self) -> Any:
        """Return a new event for `mark`."""
        return self._operations.event()

    def mark(self, event: Any) -> None:
        """Let the event stand for all work up to here."""
        self._operations.record(event, self._work)

    def finish(self) -> None:
        """Wait until all is done."""
        self.mark(self._done)
        self._operations.finish(self._done)


class DeviceBuffers:
    """Working memory on the device, by name. Memory is reused and only replaced by more, as that stops the
    device.

    Args:
        queue: Queue of the caller.
        places: Number of buffers that `fill` uses in turn for a name. With 2 a batch arrives while the batch
            before is in use; with 1 the copy waits for all earlier work.
    """

    def __init__(self, queue: DeviceQueue, places: int = 2) -> None:
        self._queue = queue
        self._places = places
        self._held: dict[str, Any] = {}
        self._given: dict[str, tuple[tuple[int, ...], Any]] = {}  # a new view takes 30 us
        self._batches: dict[str, int] = {}
        self._unused: dict[str, Any] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Return uninitialised memory of this name in this shape. A name always has the same dtype."""
        last_shape, there = self._given.get(name, (None, None))
        if last_shape == shape:
            return there
        size = math.prod(shape)
        if name not in self._held or len(self._held[name]) < size:
            if name in self._held:
                self._queue.finish()  # it may be in use
                del self._held[name], self._given[name], there
            self._held[name] = cuda.device_array(max(size, 1), dtype)
        there = self._held[name][:size].reshape(shape)
        self._given[name] = shape, there
        return there

    def reserve(self, name: str, count: int, dtype: DTypeLike) -> None:
        """Allocate the memory that `fill` needs for `count` values of this name."""
        for batch in range(self._places):
            self.get(self._place(name, batch), (count,), dtype)

    def zeros(self, name: str, count: int) -> Any:
        """Return the memory of this name, int64 [count], set to 0."""
        there = self.get(name, (count,), np.int64)
        self._queue.zero(there)
        return there

    def fill(self, name: str, values: NDArray[Any]) -> Any:
        """Copy values to the device and return the copy, valid until the next `fill` of this name."""
        # With two buffers, all work that uses the one to be overwritten was queued before the last `fill`,
        # which has left a mark. So the copy waits for this mark alone, and not for the kernels that are at
        # work now.
        batch = self._batches.get(name, 0)
        there = self.get(self._place(name, batch), values.shape, values.dtype)
        if not batch:
            self._unused[name] = self._queue.event()
        if self._places == 1:
            self._queue.mark(self._unused[name])
        self._queue.send(there, values, self._unused[name])
        self._queue.mark(self._unused[name])
        self._batches[name] = batch + 1
        return there

    def _place(self, name: str, batch: int) -> str:
        return f"{name}, place {batch % self._places}"
