"""A dense table in the memory of a CUDA device."""

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from psfleet.kernels.cuda import CudaUpdate
from psfleet.schema.table import Device, TableSpec
from psfleet.tables.dense_memory import slot_sizes
from psfleet.tables.devices import check_device_memory

__all__ = ["DeviceDenseMemory"]

Floats = NDArray[np.float32]


class DeviceDenseMemory:
    """See psfleet.tables.dense_memory.DenseMemory.

    A push copies its gradient to the device, where it has a place of its own.

    Raises:
        UsageError: The device has too little memory.
    """

    device: Device = "cuda"

    def __init__(self, spec: TableSpec, value: Floats, width: int) -> None:
        sizes = slot_sizes(spec, len(value), width)
        self.lengths = [len(value), *sizes]
        self.bytes = 4 * (len(value) + sum(self.lengths))
        check_device_memory(spec.name, self.bytes)
        self._planes = [cuda.to_device(np.ascontiguousarray(value, np.float32))]
        self._planes += [
            cuda.to_device(np.full(size, slot.initial, np.float32))
            for slot, size in zip(spec.rule.slots, sizes, strict=True)
        ]
        self._gradient = cuda.device_array(len(value), np.float32)
        self._width = width
        self._update = CudaUpdate(spec.rule, spec.decay)

    def push(self, gradient: Floats, scalars: Floats, step: int) -> None:
        """See DenseMemory."""
        if len(gradient):
            self._gradient.copy_to_device(gradient)
            self._update.dense(self._planes, self._gradient, self._width, scalars, step)

    def pull_into(self, out: Floats) -> None:
        """See DenseMemory."""
        if len(out):
            self._planes[0].copy_to_host(out)

    def read(self, plane: int, start: int = 0, end: int | None = None) -> Floats:
        """See DenseMemory."""
        found: Floats = self._planes[plane][start:end].copy_to_host()
        return found

    def write(self, plane: int, start: int, values: Floats) -> None:
        """See DenseMemory."""
        if len(values):
            there = self._planes[plane][start : start + len(values)]
            there.copy_to_device(np.ascontiguousarray(values, np.float32))
