"""Run in a process of its own: compiles all CUDA kernels, with no device and no driver."""

import inspect
import re
import sys

from psfleet.kernels.cuda_ptx import compile_ptx, compile_table_ptx
from psfleet.rules import ASGD, RULES, Ftrl, Momentum, RMSProp, Rule
from psfleet.rules.functions import functions_of

RULE_CASES: list[Rule] = [rule() for rule in RULES.values()]
# What is not rounded to nearest, or fused: a product that names no rounding may still be fused by the driver.
LOOSE = re.compile(r"fma\.\S*f\d\d|mul\.f\d\d|(div|sqrt)\.(?!rn)\S*f\d\d|\.ftz|\.f64")
RULE_CASES += [ASGD(2), Ftrl(0.1, 0.1, -0.4), RMSProp(centered=True), Momentum(use_nesterov=True)]


def is_loose(name: str, ptx: str) -> bool:
    """Whether the kernel of this name may give other bits than the CPU's."""
    found = {match.group() for match in LOOSE.finditer(ptx)}
    if name in ("fold", "combine", "decay"):  # sums of chunks and the worth of scores are float64
        found.discard(".f64")
    return ".entry" not in ptx or bool(found)


def has_power(rule: Rule) -> bool:
    """Whether a rule calls the device's power function, which is another one: docs/gpu.md."""
    return any("math.pow" in inspect.getsource(function) for function in functions_of(rule))


def main() -> int:
    """Compile everything; say what is wrong."""
    compiled = {
        (rule, dim, name): ptx
        for rule in RULE_CASES
        for dim in (0, 16)
        for name, ptx in compile_ptx(rule, dim).items()
    }
    wrong = [
        case for case, ptx in compiled.items() if is_loose(case[2], ptx) and not has_power(case[0])
    ]
    tables = compile_table_ptx()
    loose = [name for name, ptx in tables.items() if is_loose(name, ptx)]
    count = len(compiled) + len(tables)
    print(f"{count} kernels, no entry or other bits than the CPU's: {wrong + loose}")
    return bool(wrong or loose)


if __name__ == "__main__":
    sys.exit(main())
