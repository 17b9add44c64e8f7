"""Run in a process of its own: compiles all CUDA kernels to PTX and cubins, with no device and no driver.

Arguments: the parts to compile, tables, dense and rows; none: all. With --list: print the table of registers
that stands in benchmarks/README.md.
The kernels of one rule of each shape are compiled, unless PSFLEET_TORTURE or --list asks for all: that all
compute alike is the simulator's matter.
"""
# mypy: disable-error-code="no-untyped-call,attr-defined"

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cuda.bindings import nvjitlink
from numba import boolean, float32, float64, int64, uint8, uint16, uint32, uint64, void

from psfleet.core.engine.kernels.device.cuda import compile_ptx, ptx_of, table_kernels
from psfleet.core.engine.rules import Rule
from psfleet.core.engine.rules.rule import functions_of
from tests.kernels import rule_cases

# What is not rounded to nearest, or fused: a product that names no rounding may still be fused by the driver.
# A device's own max and min take a number for NaN, where the CPU takes the first of the two.
LOOSE = re.compile(
    r"(max|min)\.f\d\d|fma\.\S*f\d\d|mul\.f\d\d|(div|sqrt)\.(?!rn)\S*f\d\d|\.ftz|\.f64"
)
TRIES_ALL = "--list" in sys.argv or rule_cases.IS_FULL
RULE_CASES = [
    rule
    for rule in rule_cases.RULE_CASES + rule_cases.POWER_CASES
    if TRIES_ALL or type(rule) in rule_cases.SHAPES
]


_VERBOSE = ("-arch=sm_90", "-verbose")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


_FLAT = float32[::1]
_I64, _U64, _U32, _U8 = int64[::1], uint64[::1], uint32[::1], uint8[::1]
_U16 = uint16[::1]
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
    "widen": (_FLAT, _U16, int64, _I64, int64, boolean, int64, int64, _FLAT, int64, int64),
    "narrow": (
        _FLAT,
        _U16,
        int64,
        _I64,
        _U64,
        int64,
        boolean,
        int64,
        int64,
        _FLAT,
        *[int64] * 2,
        uint64,
        int64,
    ),
    "packed_begin": (_U16, int64, _U64, _I64, _U8, int64, int64, *_FIRST),
    "packed_weights": (_U16, int64, _U64, _I64, int64, int64, *_FIRST, _FLAT),
}

_DISTINCT_KERNELS: dict[str, tuple[Any, ...]] = {
    "claim": (_U64, int64, _U64, int64, _U32, _U32),
    "flag": (_U32, _U32, int64, int64, _U8, _I64),
    "place": (_I64, int64, _I64),
    "number": (_U64, int64, int64, _U8, _I64, _U64, _U32),
    "encode": (_U32, _U32, int64, _U32, _U32),
}


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


def compile_table_ptx() -> dict[tuple[str, str], str]:
    """The same of each kernel of a sparse table that no rule has a part in, by its module and name."""
    modules = {"index": _INDEX_KERNELS, "rows": _ROW_KERNELS, "distinct": _DISTINCT_KERNELS}
    return {
        (name, kernel): ptx
        for name, kernels in modules.items()
        for kernel, ptx in _compiled(table_kernels(f"cuda_{name}"), kernels).items()
    }


def _compiled(module: ModuleType, kernels: dict[str, tuple[Any, ...]]) -> dict[str, str]:
    return {
        name: ptx_of(getattr(module, name), void(*arguments)) for name, arguments in kernels.items()
    }


def is_loose(name: str, ptx: str) -> bool:
    """Whether the kernel of this name may give other bits than the CPU's."""
    names = {match.group() for match in LOOSE.finditer(ptx)}
    if name in (
        "fold",
        "combine",
        "decay",
    ):  # sums of chunks, and what shows are worth, are float64
        names.discard(".f64")
    return ".entry" not in ptx or bool(names)


def has_power(rule: Rule) -> bool:
    """Whether a rule calls the device's power function, which is another one: docs/gpu.md."""
    return any("math.pow" in inspect.getsource(function) for function in functions_of(rule))


def listed(cubins: dict[tuple[str, str], Cubin]) -> str:
    """The rows of the table in benchmarks/README.md: registers of a thread, by what kernels belong to."""
    rows: dict[str, list[str]] = {}
    for (owner, name), cubin in cubins.items():
        rows.setdefault(owner, []).append(f"{name} {cubin.registers}")
    return "\n".join(f"| {owner} | {', '.join(kernels)} |" for owner, kernels in rows.items())


def owner_of(rule: Rule, dim: int) -> str:
    """What a kernel of a rule belongs to, for messages and the list."""
    changed = [
        f"{key}={value}"
        for key, value in vars(rule).items()
        if vars(type(rule)()).get(key) != value
    ]
    return f"{type(rule).__name__}({', '.join(changed)}), {f'rows of {dim}' if dim else 'dense'}"


def rule_kernels(dim: int) -> dict[tuple[str, str], str]:
    """The PTX of the rules' kernels, by what they belong to and their names."""
    return {
        (owner_of(rule, dim), name): ptx
        for rule in RULE_CASES
        for name, ptx in compile_ptx(rule, dim).items()
    }


PARTS: dict[str, Callable[[], dict[tuple[str, str], str]]] = {
    "tables": compile_table_ptx,
    "dense": lambda: rule_kernels(0),
    "rows": lambda: rule_kernels(16),
}


def main(parts: list[str]) -> int:
    """Compile these parts; say what is wrong."""
    kernels = {case: ptx for part in parts for case, ptx in PARTS[part]().items()}
    exempt = {owner_of(rule, dim) for rule in RULE_CASES if has_power(rule) for dim in (0, 16)}
    wrong = [
        case for case, ptx in kernels.items() if is_loose(case[1], ptx) and case[0] not in exempt
    ]
    cubins = {case: assemble_cubin(ptx) for case, ptx in kernels.items()}
    spilling = [case for case, cubin in cubins.items() if cubin.spill_bytes or cubin.stack_bytes]
    if "--list" in sys.argv:
        print(listed(cubins))
        print({cubin.shared_bytes for cubin in cubins.values()}, "bytes of shared memory")
    print(f"{len(cubins)} kernels, no entry or other bits than the CPU's: {wrong}")
    print(f"registers spilled, or local memory used: {spilling}")
    return bool(wrong or spilling or not cubins)


if __name__ == "__main__":
    sys.exit(main([part for part in sys.argv[1:] if part in PARTS] or [*PARTS]))
