"""Arrays of a CUDA device and launches of compiled kernels, by direct calls of the driver.

numba compiles the kernels. Its dispatcher can launch them too, but takes 60 us of Python for a launch and 30
us for a view of an array. A push of a few thousand rows would spend most of its time there. So a
`KernelLaunch` has the arguments of one kernel ready in the form in which the driver reads them, rewrites
those that differ from the launch before, and calls `cuLaunchKernel` of NVIDIA's bindings (cuda.bindings).
`CudaArray` is the array for such arguments. numba's simulator has no driver: there arrays are numba's, and no
`KernelLaunch` is made.

An argument of a kernel is one or several parameters of the compiled code, each in a word of 8 bytes:

    array        0, 0, number of values, bytes of a value, address, shape ..., strides in bytes ...
    tuple        the parameters of each item
    number       its bits; a narrow number fills only the first bytes of its word
"""
# mypy: disable-error-code="no-untyped-call,attr-defined"

import math
import threading
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.cudadrv import driver as cuda_driver
from numpy.typing import DTypeLike, NDArray

from psfleet.core.engine.kernels.device.cuda_arithmetic import SIMULATED

# Formats of `memoryview.cast` for the numbers that kernels take, by the names of numba's types.
_FORMATS = {"bool": "?", "int64": "q", "uint64": "Q", "float32": "f", "float64": "d"}
_WORD = 8  # bytes
_attached = threading.local()


def call(function: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver that returns nothing but its error.

    A stream or an event belongs to the device's context, which is made current in a thread by the thread's
    first call. A server calls from many threads.

    Raises:
        numba.cuda.cudadrv.driver.CudaAPIError: The driver refused the call, or earlier work has failed.
    """
    try:
        functions = _attached.functions
    except AttributeError:
        cuda.current_context()
        functions = _attached.functions = vars(cuda_driver.binding)
    (error,) = functions[function](*arguments)
    if error:
        raise cuda_driver.CudaAPIError(error, f"Call to {function} results in {error.name}")


class CudaArray:
    """Contiguous array in the memory of a device. Views of it are cheap, and keep its memory.

    Attributes:
        address: Address of the first value.
        shape, dtype, size, nbytes: As of NumPy's arrays.
        words: Parameters of a kernel that takes the array.
        kind: Dtype and number of dimensions. Arrays of the same kind have the same object.
    """

    __slots__ = ("_owner", "address", "dtype", "kind", "nbytes", "shape", "size", "words")

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: Any
    ) -> None:
        self._owner = owner
        self.address, self.shape, self.dtype = address, shape, dtype
        self.kind, itemsize = _kind(dtype, len(shape)), dtype.itemsize
        self.size = size = shape[0] if len(shape) == 1 else math.prod(shape)
        self.nbytes = size * itemsize
        strides = [itemsize]
        for length in shape[:0:-1]:
            strides.insert(0, strides[0] * length)
        self.words = array("q", (0, 0, size, itemsize, address, *shape, *strides))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> "CudaArray":
        """Return a range of a flat array."""
        start, stop, _ = part.indices(self.size)
        address = self.address + start * self.dtype.itemsize
        return CudaArray(address, (max(stop - start, 0),), self.dtype, self._owner)

    def first(self, shape: tuple[int, ...]) -> "CudaArray":
        """Return as many of the first values as an array of this shape has."""
        return CudaArray(self.address, shape, self.dtype, self._owner)

    def view(self, dtype: DTypeLike) -> "CudaArray":
        """Return the memory of a flat array as values of another dtype."""
        new_dtype = np.dtype(dtype)
        length = self.nbytes // new_dtype.itemsize
        return CudaArray(self.address, (length,), new_dtype, self._owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Description of the array for other libraries, such as torch.as_tensor."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
        }


@cache
def _kind(dtype: np.dtype[Any], dimensions: int) -> tuple[np.dtype[Any], int]:
    return dtype, dimensions


def _of_numba(values: Any) -> Any:
    """Return an array of numba as an array for kernels, which keeps its memory."""
    if SIMULATED:
        return values
    address = values.__cuda_array_interface__["data"][0]
    return CudaArray(address or 0, values.shape, values.dtype, values)


def empty(count: int, dtype: DTypeLike) -> Any:
    """Return a new flat array of the device, not initialised."""
    # An array of numba without values has no address.
    return _of_numba(cuda.device_array(max(count, 1), dtype))[:count]


def first_values(values: Any, shape: tuple[int, ...]) -> Any:
    """Return as many of the first values of a flat array of the device as an array of this shape has."""
    return values[: math.prod(shape)].reshape(shape) if SIMULATED else values.first(shape)


def clear(values: Any) -> None:
    """Set an array of the device to 0.

    This goes through the default stream: it waits for earlier work of all tables, and their later work waits.
    """
    if SIMULATED:
        cuda_driver.device_memset(values, 0, values.nbytes)
    else:
        call("cuMemsetD8", values.address, 0, values.nbytes)


def to_device(values: NDArray[Any]) -> Any:
    """Return a new flat array of the device with these values, after waiting for the copy."""
    return _of_numba(cuda.to_device(np.ascontiguousarray(values).reshape(-1)))


class DeviceStream:
    """Stream of the device, whose work is done in the order in which it was added.

    Attributes:
        stream: numba's stream, which is destroyed with this object.
        handle: CUstream of NVIDIA's bindings.
        launches: By kernel, its last launch on this stream.
    """

    def __init__(self) -> None:
        self.stream = cuda.stream()
        self.handle = self.stream.handle
        self.launches: dict[Any, KernelLaunch] = {}


class KernelLaunch:
    """Launches a kernel on a stream: the compiled code, and memory for the arguments of the next launch.

    The driver copies the arguments before a launch returns, so the memory is free for the next one. Not
    thread-safe: each table has its own launches, which its lock guards.

    Args:
        kernel: Kernel, a dispatcher of numba. It is compiled if numba has not yet done so for these types.
        arguments: Arguments of a launch, which decide the types.
    """

    def __init__(self, kernel: Any, arguments: Sequence[Any]) -> None:
        self._kernel = kernel
        self._types = tuple(kernel.typeof_pyval(argument) for argument in arguments)
        self._compiled = kernel.compile(self._types)
        self._compiled.bind()  # loads the code
        # A handle of a kernel is valid where the driver takes one of a function.
        handle = int(self._compiled.library.get_cufunc().handle)
        self._function = cuda_driver.binding.CUfunction(handle)
        counts = [_word_count(argument) for argument in arguments]
        self._words = array("q", [0] * sum(counts))
        first, count = self._words.buffer_info()
        self._pointers = array("q", range(first, first + _WORD * count, _WORD))
        self._parameters = self._pointers.buffer_info()[0]
        starts = [0, *accumulate(counts)]
        self._writers = [
            self._writer(argument, kind, start, count)
            for argument, kind, start, count in zip(
                arguments, self._types, starts[:-1], counts, strict=True
            )
        ]
        self._last: list[Any] = [None] * len(arguments)

    def _writer(self, argument: Any, kind: Any, start: int, count: int) -> tuple[Any, Any, Any]:
        """Return what `fill` compares an argument with, memory for it, and its positions there."""
        memory: Any = memoryview(self._words)
        if isinstance(argument, CudaArray):
            return argument.kind, memory, slice(start, start + count)
        numbers = memory.cast("B").cast(_FORMATS[str(getattr(kind, "dtype", kind))])
        step = _WORD // numbers.itemsize
        positions = range(start * step, (start + count) * step, step)
        is_tuple = isinstance(argument, tuple)
        return type(argument), numbers, positions if is_tuple else positions[0]

    def fill(self, arguments: Sequence[Any]) -> bool:
        """Write the arguments of the next launch. Return False if their types need another `KernelLaunch`.

        Only arguments that differ from those of the launch before are written. Most are the same objects:
        arrays of the table, scratch memory, and sizes.
        """
        last = self._last
        for i, argument in enumerate(arguments):
            if argument is last[i]:
                continue
            kind, memory, positions = self._writers[i]
            if isinstance(argument, CudaArray):
                words = argument.words
                if words is last[i]:
                    continue
                if argument.kind is not kind:
                    return False
                memory[positions] = words
                # Not the array itself: it would keep its memory on the device as long as this launch exists.
                last[i] = words
                continue
            if type(argument) is not kind:
                return False
            if kind is tuple:
                if len(argument) != len(positions):
                    return False
                for position, value in zip(positions, argument, strict=True):
                    memory[position] = value
            else:
                memory[positions] = argument
            last[i] = argument
        return True

    def start(self, blocks: int, threads: int, stream: Any) -> None:
        """Add the kernel to a stream, with the arguments that `fill` has written.

        Args:
            blocks: Number of blocks of threads.
            threads: Number of threads of a block.
            stream: CUstream of NVIDIA's bindings.
        """
        grid = blocks, 1, 1, threads, 1, 1
        call("cuLaunchKernel", self._function, *grid, 0, stream, self._parameters, 0)


def _word_count(argument: Any) -> int:
    if isinstance(argument, CudaArray):
        return len(argument.words)
    return len(argument) if isinstance(argument, tuple) else 1
