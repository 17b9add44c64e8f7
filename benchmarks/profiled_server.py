"""A server of psfleet that measures the time of its GPU: copies over the host link, and kernels.

    python benchmarks/profiled_server.py TOTALS ARGUMENTS...

TOTALS is a file of float64 for `read_totals`. ARGUMENTS are those of psfleet-server. Times are measured
between two events on the stream of the work. For short work they are upper bounds, because they include the
time in which the device waited for the host's next call. Work of two streams may overlap.
"""

# mypy: disable-error-code="no-untyped-call"

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["KINDS", "read_totals"]

KINDS = ("to the GPU", "to the host", "on the GPU")


def read_totals(path: Path) -> NDArray[np.float64]:
    """Return for each of KINDS the bytes, seconds and number of operations so far. Float64 [3, 3]."""
    return np.fromfile(path).reshape(len(KINDS), 3)


def _profile(totals: NDArray[np.float64]) -> None:
    """Make the tables of this process add up their device operations in `totals`."""
    from numba import cuda

    from psfleet.core.engine.kernels.device import cuda_queue
    from psfleet.core.engine.kernels.device.cuda_arithmetic import SIMULATED
    from psfleet.core.engine.kernels.device.cuda_queue import DeviceOperations, Staging

    class ProfiledOperations(DeviceOperations):
        def __init__(self) -> None:
            self._lock = threading.Lock()
            self._spans: deque[tuple[int, int, Any, Any]] = deque()

        def write(self, target: Any, source: Any, stream: Any) -> None:
            arrives = isinstance(source, np.ndarray)
            with self._timed(0 if arrives else 2, target.nbytes if arrives else 0, stream):
                super().write(target, source, stream)

        def read(self, source: Any, target: NDArray[Any], stream: Any) -> None:
            with self._timed(1, target.nbytes, stream):
                super().read(source, target, stream)

        def zero(self, target: Any, stream: Any) -> None:
            with self._timed(2, 0, stream):
                super().zero(target, stream)

        def launch(
            self, kernel: Any, blocks: int, threads: int, stream: Any, arguments: Any
        ) -> None:
            with self._timed(2, 0, stream):
                super().launch(kernel, blocks, threads, stream, arguments)

        @contextmanager
        def _timed(self, kind: int, size: int, stream: Any) -> Iterator[None]:
            first = self._now(stream)
            yield
            with self._lock:
                self._spans.append((kind, size, first, self._now(stream)))
                while self._spans and (SIMULATED or self._spans[0][-1].query()):
                    self._add(*self._spans.popleft())

        def _now(self, stream: Any) -> Any:
            """Record this point of the stream's work. The simulator executes at once and has no events."""
            if SIMULATED:
                return time.perf_counter()
            event = cuda.event()
            event.record(stream.stream)
            return event

        def _add(self, kind: int, size: int, first: Any, last: Any) -> None:
            seconds = last - first if SIMULATED else cuda.event_elapsed_time(first, last) / 1e3
            totals[kind] += (size, seconds, 1)

    staging = Staging(ProfiledOperations())
    cuda_queue.shared_staging = lambda: staging  # type: ignore[assignment]


if __name__ == "__main__":
    path = sys.argv.pop(1)
    np.zeros((len(KINDS), 3)).tofile(path)
    _profile(np.memmap(path, np.float64, "r+", shape=(len(KINDS), 3)))
    from psfleet_server.__main__ import main

    main()
