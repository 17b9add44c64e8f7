"""CUDA kernels as PTX, the assembly of NVIDIA's devices, and as machine code."""
# mypy: disable-error-code="no-untyped-call,attr-defined"

import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cuda.bindings import nvjitlink
from numba import cuda, float32, float64, int8, int64, types, uint8, uint16, uint32, uint64, void

from psfleet.kernels.device.cuda import cuda_kernels, table_kernels
from psfleet.kernels.generate import device_eviction_kernels
from psfleet.rules.eviction_policy import EvictionPolicy
from psfleet.rules.rule import Rule

_VERBOSE = ("-arch=sm_90", "-verbose")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Cubin:
    """The machine code of one kernel, and what a thread or a block of it uses.

    Attributes:
        image: The code, an ELF file.
        registers: 32-bit registers of a thread.
        shared_bytes: Shared memory of a block that the code itself asks for.
        stack_bytes: Local memory of a thread, spilled registers among it.
        spill_bytes: Bytes that a thread stores and loads since it has too few registers.
    """

    image: bytes
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def assemble_cubin(ptx: str) -> Cubin:
    """The cubin of one kernel for compute capability 9.0.

    Raises:
        cuda.bindings.nvjitlink.nvJitLinkError: The assembler refuses the text.
    """
    text = ptx.encode()
    linker = nvjitlink.create(len(_VERBOSE), list(_VERBOSE))
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, text, len(text), "kernel")
        nvjitlink.complete(linker)
        image = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, image)
        log = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, log)
    finally:
        nvjitlink.destroy(linker)
    report = log.decode()
    stack, *spills = _numbers(_STACK, report)
    (registers,), (shared,) = _numbers(_REGISTERS, report), _numbers(_SHARED, report)
    return Cubin(bytes(image), registers, shared, stack, sum(spills))


def _numbers(pattern: re.Pattern[str], report: str) -> list[int]:
    match = pattern.search(report)
    if match is None:
        raise ValueError(f"nvJitLink's report lacks {pattern.pattern!r}: {report!r}")
    return [int(number) for number in match.groups()]


_FLAT, _SUMS, _TOTALS, _EXTRA = float32[::1], float32[:, :, ::1], float64[:, ::1], float32[:, ::1]
_I64, _U64, _U32, _U8 = int64[::1], uint64[::1], uint32[::1], uint8[::1]
_U16, _I8 = uint16[::1], int8[::1]
_ENTRIES = (_U64, _U32, _U32, _I64, _U64)
_FIRST = (float32, float32, uint64)
_INDEX_KERNELS: dict[str, tuple[Any, ...]] = {
    "find": (*_ENTRIES, _U64, int64, int64, int64, _I64, int64, int64, _I64, _I64, _I64),
    "add": (*_ENTRIES, _U64, int64, int64, _I64, int64, _U32, int64, int64, _I64, _U8, _I64),
    "forget": (*_ENTRIES, _U64, int64, _U32, int64, _I64),
    "rebuild": (*_ENTRIES, int64, _U64, _U32, _U32),
    "count_entries": (_U64, _U32, int64, _I64),
    "collect": (*_ENTRIES[:3], *[int64] * 5, _U64, _I64, _I64, _I64),
    "histogram": (_U32, _U32, *[int64] * 4, _I64),
    "restamp": (_U32, *[int64] * 3),
    "decay": (_U64, _U32, int64, _FLAT, int64, int64, *[float64] * 4, _U64, _I64),
    "unmarked": (_U64, _U32, int64, _U8, _I64, _U64, _I64),
}
_ROW_KERNELS: dict[str, tuple[Any, ...]] = {
    "gather": (_FLAT, int64, _I64, int64, _FLAT),
    "scatter": (_FLAT, int64, _I64, int64, int64, _FLAT),
    "weights": (_FLAT, int64, _U64, _I64, int64, int64, *_FIRST, _FLAT),
    "begin": (_FLAT, int64, _U64, _I64, _U8, int64, int64, *_FIRST, _FLAT),
    "add_scores": (_FLAT, int64, _I64, int64, int64, int64, _FLAT, int64),
    "merge": (_U32, int64, int64, _FLAT, _FLAT),
    "scale": (_FLAT, int64, int64, int64, float32),
    "mark": (_I64, int64, _U8, int64),
    "widen": (_FLAT, _U16, _I8, int64, _I64, *[int64] * 4, _FLAT, int64, int64),
    "narrow": (_FLAT, _U16, int64, _I64, _U64, *[int64] * 4, _FLAT, *[int64] * 2, uint64, int64),
    "narrow_codes": (
        _FLAT,
        _I8,
        int64,
        _I64,
        _U64,
        *[int64] * 3,
        _FLAT,
        *[int64] * 2,
        uint64,
        int64,
    ),
    "packed_begin": (_U16, int64, _U64, _I64, _U8, int64, int64, *_FIRST),
    "packed_weights": (_U16, int64, _U64, _I64, int64, int64, *_FIRST, _FLAT),
}
_EVICTION_KERNELS: dict[str, tuple[Any, ...]] = {
    "rank": (
        *_ENTRIES[:3],
        *(int64, _FLAT, int64, int64),
        *(int64, int64, uint64, _U64, _U64, _I64),
    ),
    "use": (*_ENTRIES, _U64, int64, int64, _FLAT, int64, int64),
}


def compile_ptx(rule: Rule, dim: int) -> dict[str, str]:
    """The PTX of each kernel for compute capability 9.0, with both weight decays; dim 0: dense arrays."""
    _, kernels = cuda_kernels(rule, True, True, dim)
    signatures = _signatures(rule, dim).items()
    return {name: _ptx(getattr(kernels, name), signature) for name, signature in signatures}


def compile_table_ptx() -> dict[tuple[str, str], str]:
    """The same of each kernel of a sparse table that no rule has a part in, by its module and name."""
    modules = {"index": _INDEX_KERNELS, "rows": _ROW_KERNELS}
    return {
        (name, kernel): ptx
        for name, kernels in modules.items()
        for kernel, ptx in _compiled(table_kernels(f"cuda_{name}"), kernels).items()
    }


def compile_eviction_ptx(policy: EvictionPolicy) -> dict[str, str]:
    """The same of each kernel that ranks rows by a policy's score, in a table with shows and clicks."""
    return _compiled(device_eviction_kernels(policy, 2), _EVICTION_KERNELS)


def _compiled(module: ModuleType, kernels: dict[str, tuple[Any, ...]]) -> dict[str, str]:
    return {
        name: _ptx(getattr(module, name), void(*arguments)) for name, arguments in kernels.items()
    }


def _ptx(kernel: Any, signature: Any) -> str:
    text, _ = cuda.compile(
        kernel.py_func, signature, device=False, cc=(9, 0), output="ptx", abi="numba"
    )
    assert isinstance(text, str)
    return text


def _signatures(rule: Rule, dim: int) -> dict[str, Any]:
    text, _ = cuda_kernels(rule, True, True, dim)
    values = [int64[::1], _FLAT] if dim else [_FLAT] * len(text.arguments)
    h = types.UniTuple(float32, len(rule.scalars(0.1, 1)) + 2)
    signatures = {"update": void(int64, int64, int64, _FLAT, *values, _EXTRA, h)}
    if text.sums:
        signatures["lanes"] = void(int64, int64, int64, _FLAT, *values, _SUMS, h)
        signatures["fold"] = void(int64, _SUMS, _TOTALS)
    if text.extra_width:
        signatures["combine"] = void(int64, int64, int64, *values, _TOTALS, _EXTRA, h)
    return signatures
