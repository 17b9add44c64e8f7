"""DistinctIds: finds the distinct ids of several pushes on a CUDA device.

A server in sync mode applies the mean of its workers' gradients, so it needs to know which of their rows
belong to the same id. The kernels are in psfleet.core.engine.kernels.device.cuda_distinct. On the host,
psfleet.core.engine.kernels.dedup does the same.
"""

from typing import Any

import numpy as np

from psfleet.core.engine.kernels.device.cuda import table_kernels
from psfleet.core.engine.kernels.device.cuda_queue import DeviceBuffers, DeviceQueue

cuda_distinct = table_kernels("cuda_distinct")


class DistinctIds:
    """Scratch memory on the device for the search of distinct ids: 45 to 69 bytes for each id.

    Not thread-safe.

    Args:
        queue: Queue of the table's work on the device.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._buffers = DeviceBuffers(queue)

    def find(self, ids: Any) -> tuple[Any, Any]:
        """Find the distinct ids, and wait until their number is known. The results are on the device.

        Args:
            ids: uint64 [n] on the device, repeats allowed.

        Returns:
            The distinct ids in order of first occurrence, uint64 [m], valid until the next call.
            The number of each id among them, uint32 [n], valid until the next call.
        """
        n, get, launch = len(ids), self._buffers.get, self._queue.launch
        unique, codes = get("unique", (n,), np.uint64), get("codes", (n,), np.uint32)
        if not n:
            return unique, codes
        # At least two entries for each id, so that searches are short. As many chunks as a chunk has ids:
        # the work of a thread grows with both.
        entry_count, shift = 1 << (2 * n - 1).bit_length(), n.bit_length() // 2
        chunks = (n - 1 >> shift) + 1
        keys = get("keys", (entry_count + 1,), np.uint64)
        latest = get("latest", (entry_count + 1,), np.uint32)
        self._queue.zero(keys)
        self._queue.zero(latest)
        entries, numbers = get("entries", (n,), np.uint32), get("numbers", (n,), np.uint32)
        firsts, starts = get("firsts", (n,), np.uint8), get("starts", (chunks + 1,), np.int64)
        counts = self._buffers.zeros("counts", chunks)
        launch(cuda_distinct.claim, n, keys, entry_count - 1, ids, n, entries, latest)
        launch(cuda_distinct.flag, n, entries, latest, n, shift, firsts, counts)
        launch(cuda_distinct.place, chunks + 1, counts, chunks, starts)
        launch(cuda_distinct.number, n, ids, n, shift, firsts, starts, unique, numbers)
        launch(cuda_distinct.encode, n, entries, latest, n, numbers, codes)
        return unique[: int(self._queue.read(starts)[-1])], codes
