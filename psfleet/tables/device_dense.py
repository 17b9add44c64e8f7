"""A dense table in the memory of a CUDA device."""

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from psfleet.kernels.cuda import CudaUpdate
from psfleet.kernels.cuda_queue import DeviceBuffers, DeviceQueue
from psfleet.schema.table import TableSpec
from psfleet.tables.cuda_memory import check_device_memory
from psfleet.tables.dense_memory import dense_bytes, gradient_places, slot_sizes

__all__ = ["DeviceDenseMemory"]

Floats = NDArray[np.float32]


class DeviceDenseMemory:
    """See psfleet.tables.dense_memory.DenseMemory.

    A push copies its gradient to the device, where it has a place of its own. Short ones have two places, so
    that one arrives while the update by the other is at work.

    Raises:
        UsageError: The device has too little memory.
    """

    def __init__(self, spec: TableSpec, value: Floats, width: int) -> None:
        sizes = slot_sizes(spec, len(value), width)
        self.lengths = [len(value), *sizes]
        places = gradient_places(len(value))
        self.bytes = dense_bytes(spec, len(value), places)
        check_device_memory(spec.name, self.bytes)
        self._queue = DeviceQueue()
        self._planes = [cuda.to_device(np.ascontiguousarray(value, np.float32))]
        self._planes += [
            cuda.to_device(np.full(size, slot.initial, np.float32))
            for slot, size in zip(spec.rule.slots, sizes, strict=True)
        ]
        self._gradients = DeviceBuffers(self._queue, places)
        self._gradients.reserve("gradient", len(value), np.float32)
        self._width = width
        self._update = CudaUpdate(spec.rule, spec.decay, self._queue)

    def push(self, gradient: Floats, scalars: Floats, step: int) -> None:
        """See DenseMemory."""
        if len(gradient):
            arrived = self._gradients.fill("gradient", gradient)
            self._update.dense(self._planes, arrived, self._width, scalars, step)

    def pull_into(self, out: Floats) -> None:
        """See DenseMemory."""
        self._queue.read_into(self._planes[0], out)

    def read(self, plane: int, start: int = 0, end: int | None = None) -> Floats:
        """See DenseMemory."""
        return self._queue.read(self._planes[plane][start:end])

    def write(self, plane: int, start: int, values: Floats) -> None:
        """See DenseMemory."""
        there = self._planes[plane][start : start + len(values)]
        self._queue.write(there, values.astype(np.float32, copy=False))
