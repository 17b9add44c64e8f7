"""The kernels of a device, compiled for the processor: numba's simulator with the speed of machine code.

The text of a kernel is that of the device; its threads are threads of this machine that run at the same time,
with atomic operations of the processor, and each access is checked against the size of its array. Numba gives
all numbers the types that they have on a device, where the simulator has those of Python.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined"

import ast
import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numba import int64, njit, types, uint64
from numba.core import cgutils
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
from numba.extending import intrinsic

from psfleet.core.engine.kernels import hashing, row_rounding
from psfleet.core.engine.kernels.cache import load_text
from psfleet.core.engine.kernels.device import cuda, cuda_queue
from psfleet.core.engine.kernels.device.cuda_queue import DeviceOperations, Staging
from psfleet.core.engine.kernels.hashing import mix

__all__ = ["CompiledOperations", "imported", "install", "load", "run", "start_threads", "use"]

THREADS = 4  # of a kernel
_COMPILED = (
    "njit(nogil=True, cache=True, boundscheck=True, error_model='numpy')"  # 1 / 0 is infinite there
)
_KERNELS = Path(cuda.__file__).parent


def device_function(function):
    """A function that kernels call."""
    return njit(boundscheck=True, error_model="numpy")(function)


@njit
def first_max(a, b):
    return b if b > a else a


@njit
def first_min(a, b):
    return b if b < a else a


@njit
def rounded_product(a, b):
    """The processor's compiler joins no product with a sum."""
    return a * b


rounded_double_product = rounded_product


@njit
def random_bits(hashed, stream, k):
    seed = mix(hashed ^ stream)
    return int64(mix(seed + uint64(k + 1) * uint64(hashing.GOLDEN)) >> uint64(40))


def _changed(operation: str) -> Any:
    """The atomic operation of the processor of this name; gives what was there before."""

    @intrinsic
    def change(context, array, index, value):
        def generate(context, builder, signature, arguments):
            there = _place(context, builder, signature.args[0], arguments)
            return builder.atomic_rmw(operation, there, arguments[2], "seq_cst")

        return array.dtype(array, types.int64, array.dtype), generate

    return change


def _place(context, builder, kind, arguments):
    array = context.make_array(kind)(context, builder, arguments[0])
    return cgutils.get_item_pointer(context, builder, kind, array, [arguments[1]])


@intrinsic
def atomic_cas(context, array, index, old, new):
    """Compare and swap."""

    def generate(context, builder, signature, arguments):
        there = _place(context, builder, signature.args[0], arguments)
        exchange = builder.cmpxchg(there, arguments[2], arguments[3], "seq_cst", "seq_cst")
        return builder.extract_value(exchange, 0)

    return array.dtype(array, types.int64, array.dtype, array.dtype), generate


atomic_add, atomic_exch = _changed("add"), _changed("xchg")
atomic_max = _changed("umax")  # of unsigned numbers


class _ForTheProcessor(ast.NodeTransformer):
    """Makes of a module of kernels one whose kernels are functions with two more arguments: the number of the
    thread, and how many there are."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        module = node.module or ""
        if module == "psfleet.core.engine.kernels.device.cuda_arithmetic":
            return ast.parse("\n".join(_arithmetic(alias.name) for alias in node.names)).body
        if module == "numba":
            node.names = [alias for alias in node.names if alias.name != "cuda"]
        elif module.startswith("psfleet.core.engine.kernels.device.cuda_"):
            imported(module.split(".")[-1])  # before the lock of what is loaded now
            text = f"from {__name__} import imported\n"
            text += "\n".join(
                f"{alias.name} = imported({module.split('.')[-1]!r}).{alias.name}"
                for alias in node.names
            )
            return ast.parse(text).body
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        is_kernel = any(
            ast.unparse(one) in ("cuda.jit", "cuda.jit(cache=True)") for one in node.decorator_list
        )
        if is_kernel:
            node.args.args += [ast.arg("own_thread"), ast.arg("all_threads")]
        node.decorator_list = [ast.parse(_COMPILED, mode="eval").body]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = ast.unparse(node.func)
        if called == "cuda.grid":
            return ast.Name("own_thread", ast.Load())
        if called == "cuda.gridsize":
            return ast.Name("all_threads", ast.Load())
        if called.startswith("cuda.atomic."):
            node.func = ast.Name(f"atomic_{called.split('.')[-1]}", ast.Load())
        return node


def _arithmetic(name: str) -> str:
    """Where a name of cuda_arithmetic is for the processor."""
    if name == "math":
        return "import math"
    for module in (row_rounding, hashing):  # the same text for the processor
        if getattr(getattr(module, name, None), "__module__", "") == module.__name__:
            return f"from {module.__name__} import {name}"
    return f"from {__name__} import {name}"


def load(stem: str, text: str) -> ModuleType:
    """A module of kernels for the processor."""
    tree = _ForTheProcessor().visit(ast.parse(text))
    head = f"from numba import njit\nfrom {__name__} import atomic_add, atomic_cas, atomic_exch, atomic_max\n"
    helpers = (
        "".join((_KERNELS / name).read_text() for name in cuda._HELPERS)
        + Path(__file__).read_text()
    )
    body = ast.unparse(ast.fix_missing_locations(tree))
    return load_text(f"host_{stem}", head + body, helpers)


@cache
def imported(name: str) -> ModuleType:
    """The functions of `<name>.py` for the processor."""
    return load(name, (_KERNELS / f"{name}.py").read_text())


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """The threads of this process; a fork has none of its parent's."""
    pool = ThreadPoolExecutor(THREADS, "device")
    together = threading.Barrier(THREADS)  # else it starts fewer now and others later
    for _ in pool.map(lambda _: together.wait(), range(THREADS)):
        pass
    return pool


def _here(argument: Any) -> Any:
    """An array of the device as one of the host, where its memory is."""
    if isinstance(argument, FakeCUDAArray):
        return argument._ary
    if not (described := getattr(argument, "__cuda_array_interface__", None)):
        return argument
    if not argument.size:
        return np.empty(argument.shape, argument.dtype)
    start = (ctypes.c_char * argument.nbytes).from_address(described["data"][0])
    return np.frombuffer(start, argument.dtype).reshape(argument.shape)


def start_threads() -> None:
    """Have the threads of this process, before any test counts them."""
    _threads(os.getpid())


def run(kernel: Any, threads: int, values: list[Any]) -> None:
    """Run a kernel with arguments of the host."""
    if threads == 1:
        kernel(*values, 0, 1)
        return
    pool = _threads(os.getpid())
    running = [pool.submit(partial(kernel, *values, own, THREADS)) for own in range(THREADS)]
    for thread in running:
        thread.result()


class CompiledOperations(DeviceOperations):
    """Runs kernels that `install` has had compiled."""

    def launch(self, kernel: Any, blocks: int, threads: int, stream: Any, arguments: Any) -> None:
        run(kernel, threads, [_here(one) for one in arguments])


def install() -> None:
    """Have what is loaded from now on give such kernels: call it before tables on a device are imported."""
    cuda.load_kernels = load


def use(operations: DeviceOperations, *sizes: int) -> None:
    """Tables are made on this device from now on. sizes: number and bytes of its pinned buffers."""
    staging = Staging(operations, *sizes)
    cuda_queue.shared_staging = lambda: staging  # type: ignore[assignment]
