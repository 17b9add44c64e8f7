"""Memory of a CUDA device for tables: DeviceArena for rows and index, DeviceDenseMemory for dense tables.

An arena reserves addresses for the largest size that a table may reach and maps memory as the table grows.
So growth does not copy rows, and does not need the old and the new memory at once. cudaMalloc cannot do
this; the module calls the virtual memory management of the CUDA driver (cuMemAddressReserve, cuMemMap)
through numba's bindings. In numba's simulator, host memory is used instead of a device (_SimulatedRange).
"""
# mypy: disable-error-code="no-untyped-call,attr-defined"

import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.cudadrv import driver as cuda_driver
from numpy.typing import DTypeLike, NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.kernels.device.cuda import CudaUpdate
from psfleet.core.engine.kernels.device.cuda_arithmetic import SIMULATED
from psfleet.core.engine.kernels.device.cuda_launch import CudaArray, clear, to_device
from psfleet.core.engine.kernels.device.cuda_queue import DeviceBuffers, DeviceQueue
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.device.device_room import check_device_memory
from psfleet.core.engine.tables.memory_kind import dense_bytes, gradient_places, slot_sizes

_NORESERVE = 0x4000  # MAP_NORESERVE
_SIMULATED_GRANULE = 16


Floats = NDArray[np.float32]


class DeviceArena:
    """A flat array on the device that grows without moving. Not thread-safe.

    Each growth maps one more segment of memory at the end of a reserved address range. The size of a segment
    is a multiple of the driver's smallest unit of 2 MiB. The memory is freed once the arena and every array
    that was made from `array` are gone.

    Args:
        most: Largest number of elements.
        dtype: Dtype of an element.

    Attributes:
        array: All elements, on the device. After `grow` it is a new, longer array at the same address.
        bytes: Device memory that the arena takes.

    Raises:
        UsageError: The driver has no addresses left.
    """

    def __init__(self, most: int, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._range: Any = (_SimulatedRange if SIMULATED else _DeviceRange)(
            _whole(most * self._dtype.itemsize)
        )
        self.bytes = 0
        self.array: Any = None

    def bytes_of(self, count: int) -> int:
        """Return the bytes that the arena takes after growth to `count` elements. An arena never shrinks."""
        return max(self.bytes, _whole(count * self._dtype.itemsize))

    def grow(self, count: int) -> None:
        """Make the array at least `count` elements long. New elements are zero bytes.

        Raises:
            UsageError: The driver has no memory left; the array is unchanged.
        """
        size = self.bytes_of(count)
        if size > self.bytes:
            self._range.extend(self.bytes, size)
            self.array = self._range.array(size // self._dtype.itemsize, self._dtype)
            new = self.array[self.bytes // self._dtype.itemsize :]
            clear(new)
            self.bytes = size


def _whole(size: int) -> int:
    """Round a number of bytes up to whole units that the driver can map, at least one."""
    return -(-max(size, 1) // _granule()) * _granule()


@cache
def _granule() -> int:
    """Return the smallest number of bytes that the driver maps."""
    if SIMULATED:
        return _SIMULATED_GRANULE
    smallest = cuda_driver.binding.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(cuda_driver.driver.cuMemGetAllocationGranularity(_kind(), smallest))


def _kind() -> Any:
    """Return the properties of the memory that cuMemCreate is to allocate: memory of the current device."""
    binding = cuda_driver.binding
    kind = binding.CUmemAllocationProp()
    kind.type = binding.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    kind.location.type = binding.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    kind.location.id = cuda.current_context().device.id
    return kind


@contextmanager
def _explained(size: int) -> Iterator[None]:
    """Turn an error of the CUDA driver within the block into a UsageError about `size` bytes for a table."""
    try:
        yield
    except cuda_driver.CudaAPIError as error:
        raise UsageError(
            f"the GPU's driver refuses {size >> 20:,} MiB for a table ({error}); if other programs use the "
            "GPU's memory, say with --device-memory how much tables may take"
        ) from error


class _DeviceRange:
    """A reserved address range of the device, at most as large as the device's memory.

    Raises:
        UsageError: The driver has no addresses, or no memory, left.
    """

    def __init__(self, size: int) -> None:
        _, total = cuda.current_context().get_memory_info()
        self._size = min(size, _whole(total))
        with _explained(self._size):
            self._address = int(cuda_driver.driver.cuMemAddressReserve(self._size, 0, 0, 0))
        self._mapped: list[tuple[int, int]] = []  # address and bytes of each segment
        release = weakref.finalize(self, _release, self._address, self._size, self._mapped)
        release.atexit = False  # the driver frees everything when the process ends

    def extend(self, start: int, end: int) -> None:
        """Map memory for bytes `start` to `end` - 1. On failure nothing is mapped."""
        binding, driver = cuda_driver.binding, cuda_driver.driver
        kind, segment_address, size = _kind(), self._address + start, end - start
        # Numba delays the release of arrays; release those now, since the driver may need their memory.
        cuda.current_context().deallocations.clear()
        with _explained(size):
            memory = driver.cuMemCreate(size, kind, 0)
            try:
                driver.cuMemMap(binding.CUdeviceptr(segment_address), size, 0, memory, 0)
            finally:
                driver.cuMemRelease(
                    memory
                )  # drops only our handle; mapped memory stays until unmapped
            access = binding.CUmemAccessDesc()
            access.location = kind.location
            access.flags = binding.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            try:
                driver.cuMemSetAccess(binding.CUdeviceptr(segment_address), size, [access], 1)
            except (
                cuda_driver.CudaAPIError
            ):  # unmap, or the next growth would map these addresses twice
                driver.cuMemUnmap(binding.CUdeviceptr(segment_address), size)
                raise
        self._mapped.append((segment_address, size))

    def array(self, count: int, dtype: np.dtype[Any]) -> Any:
        """Return the first `count` elements as a device array, which keeps the range alive."""
        return CudaArray(self._address, (count,), dtype, self)


def _release(address: int, size: int, segments: list[tuple[int, int]]) -> None:
    """Unmap and free a range after the device has finished all its work."""
    cuda.synchronize()  # a kernel that is still running may use the range
    binding, driver = cuda_driver.binding, cuda_driver.driver
    for segment_address, length in segments:
        driver.cuMemUnmap(binding.CUdeviceptr(segment_address), length)
    driver.cuMemAddressFree(binding.CUdeviceptr(address), size)


class _SimulatedRange:
    """Replacement for _DeviceRange in numba's simulator: host addresses that take memory at first use."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._memory = mmap.mmap(-1, size, flags=flags)

    def extend(self, start: int, end: int) -> None:
        pass

    def array(self, count: int, dtype: np.dtype[Any]) -> Any:
        from numba.cuda.cudadrv.devicearray import FakeCUDAArray

        return FakeCUDAArray(np.frombuffer(self._memory, dtype, count))


class DeviceDenseMemory:
    """Weights and optimizer state of one server's part of a dense table on the device.

    Each push copies its gradient into a buffer on the device. Unless the gradient is very long, there are two
    buffers, so that the next gradient can be copied while the update by the last one runs.

    Raises:
        UsageError: The device has too little memory.
    """

    def __init__(self, spec: TableSpec, value: Floats, width: int) -> None:
        sizes = slot_sizes(spec, len(value), width)
        self.lengths = [len(value), *sizes]
        gradient_count = gradient_places(len(value))
        self.bytes = dense_bytes(spec, len(value), gradient_count)
        check_device_memory(spec.name, self.bytes)
        self._queue = DeviceQueue()
        self._planes = [to_device(value.astype(np.float32, copy=False))]
        self._planes += [
            to_device(np.full(size, slot.initial, np.float32))
            for slot, size in zip(spec.rule.slots, sizes, strict=True)
        ]
        self._gradients = DeviceBuffers(self._queue, gradient_count)
        self._gradients.reserve("gradient", len(value), np.float32)
        self._width = width
        self._update = CudaUpdate(spec.rule, spec.decay, self._queue)

    def push(self, gradient: Floats, scalars: Floats, step: int) -> None:
        if len(gradient):
            copy = self._gradients.fill("gradient", gradient)
            self._update.dense(self._planes, copy, self._width, scalars, step)

    def pull_into(self, out: Floats) -> None:
        self._queue.read_into(self._planes[0], out)

    def read(self, plane: int, start: int = 0, end: int | None = None) -> Floats:
        if not self.lengths[plane]:
            return np.empty(0, np.float32)  # numba takes no slice of an empty array
        return self._queue.read(self._planes[plane][start:end])

    def write(self, plane: int, start: int, values: Floats) -> None:
        if len(values):
            target = self._planes[plane][start : start + len(values)]
            self._queue.write(target, values.astype(np.float32, copy=False))
