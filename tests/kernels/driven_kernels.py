"""Runs the kernels that are launched on the driver of driver.c, from nothing but what the driver is given.

The driver's device memory is memory of the host, so the twin of a kernel that is compiled for the processor
(compiled_kernels.py) can take its arguments from the parameters of the launch: addresses, sizes and numbers.
Tables do what they do on a GPU, up to the calls of the driver.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,untyped-decorator"

import ctypes
import traceback
from types import ModuleType
from typing import Any

import numba.cuda
import numpy as np
from numba.cuda import types

from psfleet.core.engine.kernels.device import cuda
from psfleet.core.engine.kernels.device.cuda_queue import DeviceOperations
from tests.tables import compiled_kernels

_FAILED = 719  # what a driver says when a kernel has failed
_RUNNER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)
)
_modules: list[tuple[ModuleType, ModuleType]] = []
_known: dict[str, tuple[Any, tuple[Any, ...]]] = {}
launched: list[tuple[str, int, bytes]] = []
"""Launches so far: name of the kernel's code, number of threads, and the bytes of all parameters."""
names: set[str] = set()
"""Kernels that have been run."""
options = {"runs": True, "records": False}


def install() -> None:
    """Have kernels run: call it before tables on a device are imported."""
    load = cuda.load_kernels

    def load_both(stem: str, text: str) -> ModuleType:
        module = load(stem, text)
        _modules.append((module, compiled_kernels.load(stem, text)))
        return module

    cuda.load_kernels = load_both
    ctypes.CDLL("libcuda.so.1").driver_runs(_run)


def _twin(name: str) -> tuple[Any, tuple[Any, ...]]:
    """The function for the processor of a kernel, and the types of its arguments."""
    if name not in _known:
        for module, twins in _modules:
            for kernel in vars(module).values():
                for compiled in getattr(kernel, "overloads", {}).values():
                    if hasattr(compiled, "entry_name"):
                        twin = getattr(twins, kernel.py_func.__name__)
                        _known[compiled.entry_name] = twin, compiled.argument_types
    return _known[name]


@_RUNNER
def _run(name: bytes, threads: int, parameters: Any) -> int:
    try:
        twin, kinds = _twin(name.decode())
        reader = _Reader(parameters)
        values = [reader.argument(kind) for kind in kinds]
        if options["records"]:
            launched.append((name.decode(), threads, b"|".join(reader.read)))
        if options["runs"]:
            names.add(twin.__name__)
            compiled_kernels.run(twin, threads, values)
    except Exception:
        traceback.print_exc()
        return _FAILED
    return 0


class _Reader:
    """Parameters of a launch, one after the other.

    Attributes:
        read: The bytes of each parameter that has been read.
    """

    def __init__(self, parameters: Any) -> None:
        self._parameters, self.read = parameters, list[bytes]()

    def argument(self, kind: Any) -> Any:
        """The next argument, of this type of numba's."""
        if isinstance(kind, types.BaseTuple):
            return tuple(self.argument(one) for one in kind)
        if not isinstance(kind, types.Array):
            return self._number(np.dtype(str(kind)))[()]
        meminfo, parent, size, item_size, address, *lengths = (
            int(self._number(np.dtype(np.int64))) for _ in range(5 + 2 * kind.ndim)
        )
        shape, strides = lengths[: kind.ndim], lengths[kind.ndim :]
        dtype = np.dtype(str(kind.dtype))
        assert (meminfo, parent, item_size) == (0, 0, dtype.itemsize)
        assert size == np.prod(shape)
        array = np.ndarray(shape, dtype, _memory(address, size * item_size))
        assert array.strides == tuple(strides)
        return array

    def _number(self, dtype: np.dtype[Any]) -> Any:
        read = ctypes.string_at(self._parameters[len(self.read)], dtype.itemsize)
        self.read.append(read)
        return np.frombuffer(read, dtype)[0]


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_char * max(size, 1)).from_address(address)


def _numbas(argument: Any) -> Any:
    """An array of psfleet's as one of numba's."""
    described = getattr(argument, "__cuda_array_interface__", None)
    if described is None:
        return argument
    return numba.cuda.from_cuda_array_interface(described, owner=argument)


class ComparedOperations(DeviceOperations):
    """Has numba's dispatcher launch each kernel too, and fails unless the driver is given the same bytes.

    Attributes:
        count: Number of launches that were compared.
    """

    count = 0

    def launch(self, kernel: Any, blocks: int, threads: int, stream: Any, arguments: Any) -> None:
        launched.clear()
        options["records"] = True
        super().launch(kernel, blocks, threads, stream, arguments)
        options["runs"] = False
        kernel[blocks, threads, stream.stream](*map(_numbas, arguments))
        options.update(runs=True, records=False)
        own, numbas = launched
        assert own == numbas, (kernel.py_func.__name__, own, numbas)
        self.count += 1
