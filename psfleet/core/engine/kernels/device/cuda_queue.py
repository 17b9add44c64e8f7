"""Ordered work on a CUDA device: streams, events, and pinned memory for copies between host and device.

Each table has a `DeviceQueue`. Its calls take effect as if each was finished before the next call starts, but
most calls only add work to a stream and return. There are two streams, so that the gradients of the next push
arrive while the kernels of this push run:

    arrivals    [ copy batch 2 ]                    [ copy batch 3 ]
                        | arrived                   ^ done: kernels no longer use the target of the copy
    work                +-> [ kernels of batch 2 ] -+-> ...

Copies go through `Staging`, pinned buffers that all tables of the process share. `DeviceBuffers` is scratch
memory on the device, by name. Tests replace `DeviceOperations` to run the same code in other orders.

numba's streams also wait for the device's default stream, and the default stream waits for them. So an
operation that names no stream is ordered too, but nothing overlaps with it.
"""
# mypy: disable-error-code="no-untyped-call,attr-defined,call-arg"

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike, NDArray

from psfleet.core.engine.kernels.cache import forget_compiled
from psfleet.core.engine.kernels.device.cuda_arithmetic import SIMULATED
from psfleet.core.engine.kernels.device.cuda_launch import (
    CudaArray,
    DeviceStream,
    KernelLaunch,
    call,
    clear,
    empty,
    first_values,
)
from psfleet.core.engine.kernels.initial_values import address_of, copy_over

# Threads of a block: a multiple of the 32 that a device runs in step. No other multiple has been compared.
_THREADS = 128
# The simulator's threads are Python threads. Two are enough to find races; more made its tests slower.
_SIMULATED_THREADS = 2
# Bytes of half a staging buffer. 65,536 rows of 16 weights fit, so that a usual batch is copied in one piece.
_HALF = 1 << 22
# Number of staging buffers of a process. Linux cannot swap out pinned memory, so all tables share these 32
# MiB, and a fifth copy at the same time waits.
_STAGING = 4
# The simulator runs one kernel at a time. On a device it lets only one thread compile a kernel, or compile it
# again because its code on disk is damaged.
_compiling = threading.Lock()

if SIMULATED:
    from numba.cuda.simulator.kernel import BlockThread

    def _is_alive(thread: threading.Thread) -> bool:
        """Wait up to 1 ms before answering: the simulator asks in a loop, which took most of its time."""
        thread.join(0.001)
        return threading.Thread.is_alive(thread)

    BlockThread.is_alive = _is_alive  # type: ignore[assignment,method-assign]


class DeviceOperations:
    """Operations of a device. All but `finish` only add work to a stream and return.

    Any thread may call, but a stream's launches only one thread at a time. The simulator does all work at
    once, so that nothing has to wait there.
    """

    def stream(self) -> Any:
        """Return a new stream, whose work is done in the order in which it was added."""
        return cuda.stream() if SIMULATED else DeviceStream()

    def event(self) -> Any:
        """Return a new event. It is over until `record` is called."""
        # By default an event would record times, which psfleet does not use. The simulator's events take no
        # argument.
        return cuda.event() if SIMULATED else cuda.event(timing=False)

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Allocate `size` bytes of page-locked host memory, which the device can read and write directly."""
        memory: NDArray[np.uint8] = cuda.pinned_array(size, np.uint8)
        return memory

    def record(self, event: Any, stream: Any) -> None:
        """Mark this point of the stream: the event is over once all work added so far is done."""
        if not SIMULATED:
            call("cuEventRecord", event.handle, stream.handle)

    def stream_at(self, handle: int) -> Any:
        """Return the stream of another library that has this handle in the driver."""
        return cuda.external_stream(handle)

    def wait(self, event: Any, stream: Any) -> None:
        """Make the work that is added to the stream from now on wait for the event's latest `record`."""
        if not SIMULATED:
            call("cuStreamWaitEvent", stream.handle, event.handle, 0)

    def finish(self, event: Any) -> None:
        """Block this thread until the event is over."""
        if not SIMULATED:
            call("cuEventSynchronize", event.handle)

    def write(self, target: Any, source: Any, stream: Any) -> None:
        """Copy an array to an array of the device that has the same size and dtype.

        Args:
            target: Array of the device.
            source: Array of the device, or pinned array of the host.
            stream: Stream that the copy is added to.
        """
        assert source.nbytes == target.nbytes
        if SIMULATED:
            target.copy_to_device(source)
        elif isinstance(source, CudaArray):
            arguments = target.address, source.address, target.nbytes, stream.handle
            call("cuMemcpyDtoDAsync", *arguments)
        else:
            arguments = target.address, address_of(source), target.nbytes, stream.handle
            call("cuMemcpyHtoDAsync", *arguments)

    def read(self, source: Any, target: NDArray[Any], stream: Any) -> None:
        """Copy an array of the device to a pinned array that has the same size and dtype."""
        assert source.nbytes == target.nbytes
        if SIMULATED:
            source.copy_to_host(target)
        else:
            arguments = address_of(target), source.address, source.nbytes, stream.handle
            call("cuMemcpyDtoHAsync", *arguments)

    def zero(self, target: Any, stream: Any) -> None:
        """Set an array of the device to 0."""
        if SIMULATED:
            clear(target)
        else:
            call("cuMemsetD8Async", target.address, 0, target.nbytes, stream.handle)

    def launch(self, kernel: Any, blocks: int, threads: int, stream: Any, arguments: Any) -> None:
        """Add a kernel to the stream. The first launch compiles the kernel, or loads it from the cache."""
        if SIMULATED:
            with _compiling:
                kernel[blocks, threads](*arguments)
            return
        launch = stream.launches.get(kernel)
        if launch is None or not launch.fill(arguments):
            launch = stream.launches[kernel] = _compiled(kernel, arguments)
            launch.fill(arguments)
        launch.start(blocks, threads, stream.handle)


def _compiled(kernel: Any, arguments: Any) -> KernelLaunch:
    """Return a kernel ready for arguments of these types, compiled or from the cache.

    If the compiled code on disk is damaged, the code is removed and the kernel compiled again.
    """
    with _compiling:
        try:
            return KernelLaunch(kernel, arguments)
        except Exception:
            # A kernel with overloads was compiled or loaded already, so the cache is not at fault.
            if kernel.overloads or not forget_compiled(kernel.py_func.__module__):
                raise
            return KernelLaunch(kernel, arguments)


class _Half:
    """Half of a staging buffer. `done` is over once the device's last copy from or to it is done."""

    def __init__(self, operations: DeviceOperations, size: int) -> None:
        self._operations = operations
        self._in_use = False
        self.memory = operations.pinned(size)
        self.done = operations.event()

    def record(self, stream: Any) -> None:
        """Mark the end of the copy that was added to the stream last."""
        self._operations.record(self.done, stream)
        self._in_use = True

    def finish(self) -> None:
        """Wait until the device has done its last copy, unless that is known already."""
        if self._in_use:
            self._operations.finish(self.done)
            self._in_use = False

    def array(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the half's memory as an array of `count` values."""
        return self.memory[: count * dtype.itemsize].view(dtype)


class Staging:
    """Pool of pinned buffers for copies between host and device. Any thread may call.

    A copy takes a buffer, or waits until a buffer is idle. A buffer has two halves, so that the host fills or
    reads a half while the device copies from or to the other half:

        send       host      [ fill A ][ fill B ][ wait for A, fill A ] ...
                   device              [ copy A ][ copy B ] ...

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

    def send(self, target: Any, values: NDArray[Any], stream: Any, waiting: Any) -> None:
        """Copy host memory to a flat array of the device, as a part of the stream's work.

        `values` may change once this returns. The device may still be copying the last two halves then; the
        next copy that takes this buffer waits for them.

        Args:
            target: Array of the device.
            values: Contiguous array of the host, flat and not empty.
            stream: Stream of the copy.
            waiting: Stream whose later work waits for the copy.
        """
        count = self._size // values.itemsize
        halves = self._idle.get()
        try:
            for start in range(0, len(values), count):
                part = values[start : start + count]
                half = halves[start // count % 2]
                # The half may be in use by this copy, two passes ago, or by an earlier copy.
                half.finish()
                buffer = half.array(len(part), values.dtype)
                copy_over(buffer, part)
                # Usually the whole target is written, and no view has to be made.
                whole = len(part) == len(values)
                target_part = target if whole else target[start : start + len(part)]
                self.operations.write(target_part, buffer, stream)
                half.record(stream)
            self.operations.wait(half.done, waiting)
        finally:
            self._idle.put(halves)

    def receive(self, source: Any, out: NDArray[Any], stream: Any) -> None:
        """Copy a flat array of the device to host memory, and wait until the copy is complete."""
        count = self._size // out.itemsize
        halves = self._idle.get()
        try:
            # The device may still read from both halves, if the last copy was a `send`. Later passes need no
            # wait: the pass before has emptied the half.
            for half in halves:
                half.finish()
            # Each pass starts the device's copy of one slice, and then takes the slice before it out of the
            # other half.
            for start in range(0, len(out) + count, count):
                if start < len(out):
                    length = min(count, len(out) - start)
                    half = halves[start // count % 2]
                    buffer = half.array(length, out.dtype)
                    source_part = source if length == len(out) else source[start : start + length]
                    self.operations.read(source_part, buffer, stream)
                    half.record(stream)
                if start:
                    half, part = halves[(start // count - 1) % 2], out[start - count : start]
                    half.finish()
                    copy_over(part, half.array(len(part), out.dtype))
        finally:
            self._idle.put(halves)


@cache
def shared_staging() -> Staging:
    """Return the staging buffers of this process, allocated by the first call."""
    return Staging(DeviceOperations())


class DeviceQueue:
    """Queue of a device's work for one table. Calls take effect in order, even where their work overlaps.

    Not thread-safe: the table's lock guards it. Arrays that are copied to or from the host are flat.

    `_work` is the stream of kernels and of copies to the host, and `_arrivals` the stream of copies from the
    host. Two waits keep the streams in order: a copy from the host waits until kernels no longer use its
    target, and later kernels wait until the copy has arrived.
    """

    def __init__(self) -> None:
        self._staging = shared_staging()
        self._operations = self._staging.operations
        self._work, self._arrivals = self._operations.stream(), self._operations.stream()
        self._done = self._operations.event()

    def launch(self, kernel: Any, count: int, *arguments: Any) -> None:
        """Run a kernel for `count` items, which the kernel's loop divides among its threads."""
        if not count:
            return
        # On a device each item has a thread. Only the simulator's few threads need the loop.
        blocks, threads = -(-count // _THREADS), _THREADS
        if SIMULATED:
            blocks, threads = 1, min(count, _SIMULATED_THREADS)
        self._operations.launch(kernel, blocks, threads, self._work, arguments)

    def copy(self, target: Any, source: Any) -> None:
        """Copy an array of the device over another one."""
        if target.size:  # an empty array of numba has no memory: its address is 0
            self._operations.write(target, source, self._work)

    def zero(self, target: Any) -> None:
        """Set an array of the device to 0."""
        if target.size:
            self._operations.zero(target, self._work)

    def write(self, target: Any, values: NDArray[Any]) -> None:
        """Copy host memory over an array of the device, after all earlier work.

        `values` may change once this returns.
        """
        # Other calls may record `_done` again at once: the wait that `send` adds keeps to this record.
        self.mark(self._done)
        self.send(target, values, self._done)

    def send(self, target: Any, values: NDArray[Any], unused: Any) -> None:
        """Copy host memory over an array of the device, while earlier work on other arrays goes on.

        Args:
            target: Array of the device.
            values: Array of the host with the same size and dtype. It may change once this returns.
            unused: Event that the caller has marked behind the last work that reads or writes `target`. The
                copy waits for this event only.
        """
        if values.size:
            flat = np.ascontiguousarray(values).reshape(-1)
            self._operations.wait(unused, self._arrivals)
            self._staging.send(target, flat, self._arrivals, self._work)

    def read(self, source: Any) -> NDArray[Any]:
        """Copy an array of the device to new host memory, after all earlier work, and wait for the copy."""
        out = np.empty(source.size, source.dtype)
        self.read_into(source, out)
        return out

    def read_into(self, source: Any, out: NDArray[Any]) -> None:
        """Copy an array of the device over contiguous host memory, and wait for the copy."""
        if out.size:
            self._staging.receive(source, out.reshape(-1), self._work)

    def event(self) -> Any:
        """Return a new event for `mark`."""
        return self._operations.event()

    def mark(self, event: Any) -> None:
        """Record the event behind all work added so far: the event is over when this work is done."""
        self._operations.record(event, self._work)

    def finish(self) -> None:
        """Wait until all work of this queue is done."""
        self.mark(self._done)
        self._operations.finish(self._done)

    @contextmanager
    def in_turn_with(self, handle: int) -> Iterator[None]:
        """Do the work that the block adds after all earlier work of another library's stream.

        Later work of that stream waits for it. So the library may free or overwrite its arrays at once: its
        allocator reuses memory in the order of the stream.

        Args:
            handle: Handle of the stream in the driver.
        """
        stream = self._operations.stream_at(handle)
        self._operations.record(self._done, stream)
        self._operations.wait(self._done, self._work)
        try:
            yield
        finally:
            self.mark(self._done)
            self._operations.wait(self._done, stream)


class DeviceBuffers:
    """Scratch memory on the device, by name.

    Memory is reused. It is replaced only if more is needed, which has to wait until the device has finished.

    Args:
        queue: Queue of the caller.
        places: Number of buffers that `fill` uses in turn for each name. With 2, a batch arrives while
            kernels use the batch before it. With 1, which takes half the memory, the copy waits for all
            earlier work.
    """

    def __init__(self, queue: DeviceQueue, places: int = 2) -> None:
        self._queue = queue
        self._places = places
        self._held: dict[str, Any] = {}
        self._given: dict[str, tuple[tuple[int, ...], Any]] = {}  # last view
        self._batches: dict[str, int] = {}
        self._unused: dict[str, Any] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Return uninitialised memory of this name in this shape, valid until a call for a larger shape.

        A name always has the same dtype. Two calls with the same name return the same memory.
        """
        last_shape, view = self._given.get(name, (None, None))
        if last_shape == shape:
            return view
        size = math.prod(shape)
        if name not in self._held or len(self._held[name]) < size:
            if name in self._held:
                self._queue.finish()  # kernels may still use the memory that is freed here
                # All references, `view` too: else the old memory would exist beside the new one.
                del self._held[name], self._given[name], view
            self._held[name] = empty(size, dtype)
        view = first_values(self._held[name], shape)
        self._given[name] = shape, view
        return view

    def reserve(self, name: str, count: int, dtype: DTypeLike) -> None:
        """Allocate the memory that `fill` needs for `count` values of this name."""
        for batch in range(self._places):
            self.get(self._place(name, batch), (count,), dtype)

    def zeros(self, name: str, count: int) -> Any:
        """Set the memory of this name to 0 and return it, int64 [count].

        The memory is allocated at the first call, and used again by later calls with the same name.
        """
        counters = self.get(name, (count,), np.int64)
        self._queue.zero(counters)
        return counters

    def fill(self, name: str, values: NDArray[Any]) -> Any:
        """Copy values to the device and return the copy, valid until the next `fill` of this name."""
        # With two buffers A and B, work is queued in this order:
        #
        #   fill A, mark | kernels use A | fill B, mark | kernels use B | fill A: waits for the mark before it
        #
        # All kernels that use A were queued before the last mark, so the copy waits for that mark only, and
        # overlaps with the kernels that use B. A single buffer may still be in use, so the mark is renewed.
        batch = self._batches.get(name, 0)
        buffer = self.get(self._place(name, batch), values.shape, values.dtype)
        if not batch:
            self._unused[name] = self._queue.event()
        if self._places == 1:
            self._queue.mark(self._unused[name])
        self._queue.send(buffer, values, self._unused[name])
        self._queue.mark(self._unused[name])
        self._batches[name] = batch + 1
        return buffer

    def _place(self, name: str, batch: int) -> str:
        return f"{name}, place {batch % self._places}"
