"""Run in a process of its own: compiles all CUDA kernels to PTX and cubins, with no device and no driver.

Arguments: the parts to compile, tables, dense and rows; none: all. With --list: print what docs/gpu.md says.
The kernels of one rule of each shape are compiled, unless PSFLEET_TORTURE or --list asks for all: that all
compute alike is the simulator's matter.
"""

import inspect
import re
import sys
from collections.abc import Callable

from psfleet.kernels.device.cuda_ptx import (
    Cubin,
    assemble_cubin,
    compile_eviction_ptx,
    compile_ptx,
    compile_table_ptx,
)
from psfleet.rules import Rule
from psfleet.rules.eviction_policy import DecayedFrequency
from psfleet.rules.rule import functions_of
from tests.kernels import rule_cases
from tests.tables.worth import Worth

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


def is_loose(name: str, ptx: str) -> bool:
    """Whether the kernel of this name may give other bits than the CPU's."""
    names = {match.group() for match in LOOSE.finditer(ptx)}
    if name in ("fold", "combine", "decay", "rank", "use"):  # sums of chunks and scores are float64
        names.discard(".f64")
    return ".entry" not in ptx or bool(names)


def has_power(rule: Rule) -> bool:
    """Whether a rule calls the device's power function, which is another one: docs/gpu.md."""
    return any("math.pow" in inspect.getsource(function) for function in functions_of(rule))


def listed(cubins: dict[tuple[str, str], Cubin]) -> str:
    """The rows of the table in docs/gpu.md: registers of a thread, by what kernels belong to."""
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


def table_kernels() -> dict[tuple[str, str], str]:
    """The same of those that no rule has a part in."""
    return compile_table_ptx() | {
        (f"eviction by {policy.name}", name): ptx
        for policy in (DecayedFrequency(3.0), Worth())
        for name, ptx in compile_eviction_ptx(policy).items()
    }


PARTS: dict[str, Callable[[], dict[tuple[str, str], str]]] = {
    "tables": table_kernels,
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
