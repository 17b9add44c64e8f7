"""Run in a process of its own with NUMBA_ENABLE_CUDASIM=1: nothing is read or overwritten before its event.

The simulator does all at once, so it would hide a missing event. Here streams do nothing until the host waits
for an event. Then they take turns in any order that events allow, drawn from a seed. Tables on such a device
must have the bits of those in host memory.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.device import cuda_queue
from psfleet.core.engine.kernels.device.cuda import table_kernels
from psfleet.core.engine.kernels.device.cuda_queue import (
    DeviceBuffers,
    DeviceOperations,
    DeviceQueue,
    Staging,
)
from psfleet.core.engine.rules import RULES
from psfleet.core.engine.tables import memory_kind
from psfleet.core.engine.tables.sparse import SparseTable
from tests.kernels.rule_cases import IS_FULL
from tests.tables import device_rows, device_tables

BUFFERS, HALF = 3, 64  # staging buffers, and bytes of half of one: most copies take several turns
Floats = NDArray[np.float32]


class Event:
    """recorded: what the last record added to its stream; true when that is done."""

    def __init__(self) -> None:
        self.recorded = [True]


class Work(NamedTuple):
    """What a stream is to do: `number` by the order of the calls; when it may be done."""

    number: int
    kind: str
    do: Callable[[], Any]
    after: list[bool]


class LateOperations(DeviceOperations):
    """Streams are queues of work that is done when the host waits.

    Attributes:
        libraries: Streams of other libraries, by handle.
        pinned_arrays: How many there are.
        overlaps: How many copies from the host were done while a kernel waited that was asked for before.
    """

    def __init__(self, seed: int) -> None:
        self._dice = np.random.default_rng(seed)
        self._streams: list[deque[Work]] = []
        self.libraries: dict[int, deque[Work]] = {0: deque()}
        self._calls = self.pinned_arrays = self.overlaps = 0
        self._lock = threading.RLock()  # several tables are at work at a time

    def stream(self) -> Any:
        stream: deque[Work] = deque()
        with self._lock:
            self._streams.append(stream)
        return stream

    def stream_at(self, handle: int) -> Any:
        """A stream of a library: that of 0 does its work at once, when it is asked to."""
        return self.libraries[handle]

    def library(self) -> int:
        """The handle of a library's stream whose work is done late."""
        stream = self.stream()
        self.libraries[len(self.libraries)] = stream
        return len(self.libraries) - 1

    def event(self) -> Any:
        return Event()

    def pinned(self, size: int) -> NDArray[np.uint8]:
        self.pinned_arrays += 1
        return super().pinned(size)

    def record(self, event: Any, stream: Any) -> None:
        flag = event.recorded = [stream is self.libraries[0]]
        if flag[0]:
            return
        self._add(stream, "record", lambda: flag.__setitem__(0, True))

    def wait(self, event: Any, stream: Any) -> None:
        if stream is self.libraries[0]:
            self.finish(event)
        else:
            self._add(stream, "wait", lambda: None, event.recorded)

    def do_late(self, handle: int, do: Callable[[], Any]) -> None:
        """Have the library do this in its stream."""
        self._add(self.libraries[handle], "library", do)

    def write(self, target: Any, source: Any, stream: Any) -> None:
        kind = "arrival" if isinstance(source, np.ndarray) else "copy"
        self._add(stream, kind, lambda: target.copy_to_device(source))

    def read(self, source: Any, target: NDArray[Any], stream: Any) -> None:
        self._add(stream, "read", lambda: source.copy_to_host(target))

    def zero(self, target: Any, stream: Any) -> None:
        now = super().zero
        self._add(stream, "zero", lambda: now(target, 0))

    def launch(self, kernel: Any, blocks: int, threads: int, stream: Any, arguments: Any) -> None:
        now = super().launch
        self._add(stream, "kernel", lambda: now(kernel, blocks, threads, 0, arguments))

    def finish(self, event: Any) -> None:
        with self._lock:
            self._finish(event)

    def _finish(self, event: Any) -> None:
        while not event.recorded[0]:
            able = [stream for stream in self._streams if stream and stream[0].after[0]]
            work = able[self._dice.integers(len(able))].popleft()
            if work.kind == "arrival":
                waiting = (other for stream in self._streams for other in stream)
                self.overlaps += any(w.kind == "kernel" and w.number < work.number for w in waiting)
            work.do()

    def _add(
        self, stream: Any, kind: str, do: Callable[[], Any], after: list[bool] | None = None
    ) -> None:
        with self._lock:
            self._calls += 1
            stream.append(Work(self._calls, kind, do, after or [True]))


def late(seed: int) -> LateOperations:
    """From now on tables are made on such a device."""
    operations = LateOperations(seed)
    staging = Staging(operations, BUFFERS, HALF)
    cuda_queue.shared_staging = lambda: staging  # type: ignore[assignment]
    return operations


def sparse_is_in_order(seed: int) -> bool:
    """Whether programs of all kinds end with the bits of host memory."""
    for number, spec in enumerate(device_rows.SPECS):
        if number % 4 == seed % 4:
            room = (None, 5)[number // 4 % 2]
            tables = SparseTable(spec), device_rows.on_device(spec, room)
            if device_rows.run(tables, seed, 3, room):
                return False
    return True


def pushes_overlap(seed: int) -> bool:
    """Whether the next push arrives while the last one's update is at work, and the bits are the host's."""
    operations = late(seed)
    spec = device_rows.SPECS[0]
    tables, dice = [SparseTable(spec), SparseTable(spec, device="cuda")], np.random.default_rng(1)
    ids = np.arange(20)
    for _ in range(4):
        gradients = dice.standard_normal((20, spec.dim)).astype(np.float32)
        for table in tables:
            table.push(ids, gradients, 0.1)
    equal = device_rows.of_all(tables[0]) == device_rows.of_all(tables[1])
    return equal and operations.overlaps > 0 and operations.pinned_arrays == 2 * BUFFERS


def dense_is_in_order(seed: int) -> bool:
    """Whether dense tables have the bits of the host's, with one place for gradients and with two."""
    memory_kind._SHORT = 0 if seed % 2 else 1 << 24
    rules = [rule() for rule in RULES.values()]
    number = (len(rules) + 1) // 2 if IS_FULL else 3
    own = [rules[(seed // 2 * number + n) % len(rules)] for n in range(number)]
    return all(device_tables.same(rule) for rule in own)


def writes_wait(seed: int) -> bool:
    """Whether what is written after a push stands, whenever the push is done."""
    late(seed)
    buffers, values = DeviceBuffers(queue := DeviceQueue()), np.arange(100, dtype=np.float32)
    there = buffers.fill("values", values)
    for factor in (2, 3):
        queue.launch(table_kernels("cuda_rows").scale, 100, there, 100, 1, 1, np.float32(factor))
        queue.write(there, factor * values)
    return bool((queue.read(there) == 3 * values).all())


def is_reused(seed: int) -> bool:
    """Whether batches take turns in two places, however many come, and have their values when read."""
    operations = late(seed)
    queue = DeviceQueue()
    buffers, batches = DeviceBuffers(queue), [np.arange(n, n + 50) for n in range(10)]
    places = [buffers.fill("batch", batch) for batch in batches]
    kept = np.concatenate([queue.read(place) for place in places[-2:]])
    addresses = {place.__array_interface__["data"][0] for place in places}
    right = (kept == np.concatenate(batches[-2:])).all()
    return bool(right and len(addresses) == 2 and operations.pinned_arrays == 2 * BUFFERS)


CHECKS = (sparse_is_in_order, dense_is_in_order, pushes_overlap, writes_wait, is_reused)

if __name__ == "__main__":
    first, wrong = int(sys.argv[1]) if sys.argv[1:] else 0, []
    for seed in range(first, first + 4):
        late(seed)
        wrong += [f"{check.__name__} {seed}" for check in CHECKS if not check(seed)]
    print(f"wrong: {wrong}")
    sys.exit(bool(wrong))
