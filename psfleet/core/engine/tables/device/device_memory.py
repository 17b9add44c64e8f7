"""Memory of the device: the arena of rows, and dense values."""
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
from psfleet.core.engine.kernels.device.cuda_queue import DeviceBuffers, DeviceQueue
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.device.device_room import check_device_memory
from psfleet.core.engine.tables.memory_kind import dense_bytes, gradient_places, slot_sizes

_NORESERVE = 0x4000  # MAP_NORESERVE
_SIMULATED_GRANULE = 16


Floats = NDArray[np.float32]


class DeviceArena:
    """A flat array in an address range as long as it may become.

    Growing maps one more segment of memory behind the others, with the virtual memory management of the CUDA
    driver. That copies nothing and takes no memory twice. Segments are whole granules, of 2 MiB each.
    Not thread-safe. The memory is given back with the object and all that was made of `array`.

    Args:
        most: Elements that it may ever have.
        dtype: Dtype of an element.

    Attributes:
        array: All elements, on the device. `grow` sets it anew, at the same address.
        bytes: That it takes.

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
        """Bytes that it takes with so many elements."""
        return max(self.bytes, _whole(count * self._dtype.itemsize))

    def grow(self, count: int) -> None:
        """Have so many elements, or some more. The bytes of those that are new are 0.

        Raises:
            UsageError: The driver has no memory left. The array is as before.
        """
        size = self.bytes_of(count)
        if size > self.bytes:
            self._range.extend(self.bytes, size)
            self.array = self._range.array(size // self._dtype.itemsize, self._dtype)
            new = self.array[self.bytes // self._dtype.itemsize :]
            cuda_driver.device_memset(new, 0, new.nbytes)
            self.bytes = size


def _whole(size: int) -> int:
    """So many bytes in whole granules, one at least."""
    return -(-max(size, 1) // _granule()) * _granule()


@cache
def _granule() -> int:
    """Bytes of the smallest segment."""
    if SIMULATED:
        return _SIMULATED_GRANULE
    least = cuda_driver.binding.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(cuda_driver.driver.cuMemGetAllocationGranularity(_kind(), least))


def _kind() -> Any:
    """Return the properties of memory that cuMemCreate makes: memory of the current device."""
    binding = cuda_driver.binding
    kind = binding.CUmemAllocationProp()
    kind.type = binding.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    kind.location.type = binding.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    kind.location.id = cuda.current_context().device.id
    return kind


@contextmanager
def _explained(size: int) -> Iterator[None]:
    """Say what so many bytes, which the driver is asked for meanwhile, were for."""
    try:
        yield
    except cuda_driver.CudaAPIError as error:
        raise UsageError(
            f"the GPU's driver refuses {size >> 20:,} MiB for a table ({error}); if other programs use the "
            "GPU's memory, say with --device-memory how much tables may take"
        ) from error


class _DeviceRange:
    """Reserved addresses of the device, no more than it has memory.

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
        release.atexit = False  # then the process gives back everything

    def extend(self, start: int, end: int) -> None:
        """Map memory for bytes start to end - 1, or leave all as it is."""
        binding, driver = cuda_driver.binding, cuda_driver.driver
        kind, place, size = _kind(), self._address + start, end - start
        cuda.current_context().deallocations.clear()  # numba frees late
        with _explained(size):
            memory = driver.cuMemCreate(size, kind, 0)
            try:
                driver.cuMemMap(binding.CUdeviceptr(place), size, 0, memory, 0)
            finally:
                driver.cuMemRelease(memory)  # what is mapped stays until it is unmapped
            access = binding.CUmemAccessDesc()
            access.location = kind.location
            access.flags = binding.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            try:
                driver.cuMemSetAccess(binding.CUdeviceptr(place), size, [access], 1)
            except cuda_driver.CudaAPIError:  # else the next growth would map this place twice
                driver.cuMemUnmap(binding.CUdeviceptr(place), size)
                raise
        self._mapped.append((place, size))

    def array(self, count: int, dtype: np.dtype[Any]) -> Any:
        """The first elements as an array, which keeps this range."""
        interface = {
            "shape": (count,),
            "typestr": dtype.str,
            "data": (self._address, False),
            "version": 3,
        }
        return cuda.from_cuda_array_interface(interface, owner=self)


def _release(address: int, size: int, segments: list[tuple[int, int]]) -> None:
    """Give back a range when no kernel uses it any more."""
    cuda.synchronize()
    binding, driver = cuda_driver.binding, cuda_driver.driver
    for place, length in segments:
        driver.cuMemUnmap(binding.CUdeviceptr(place), length)
    driver.cuMemAddressFree(binding.CUdeviceptr(address), size)


class _SimulatedRange:
    """The same with reserved addresses of the host, whose pages come with their first use."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._memory = mmap.mmap(-1, size, flags=flags)

    def extend(self, start: int, end: int) -> None:
        pass

    def array(self, count: int, dtype: np.dtype[Any]) -> Any:
        from numba.cuda.cudadrv.devicearray import FakeCUDAArray

        return FakeCUDAArray(np.frombuffer(self._memory, dtype, count))


class DeviceDenseMemory:
    """See psfleet.core.engine.tables.memory_kind.DenseMemory.

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
            there = self._planes[plane][start : start + len(values)]
            self._queue.write(there, values.astype(np.float32, copy=False))
