"""Run in a process of its own: compiles every rule's CUDA kernels, with no device and no driver."""

import inspect
import re
import sys

from psfleet.kernels.cuda_ptx import compile_ptx
from psfleet.rules import ASGD, RULES, Ftrl, Momentum, RMSProp, Rule
from psfleet.rules.functions import functions_of

RULE_CASES: list[Rule] = [rule() for rule in RULES.values()]
# What is not rounded to nearest, or fused: a product that names no rounding may still be fused by the driver.
LOOSE = re.compile(r"fma\.\S*f32|mul\.f32|(div|sqrt)\.(?!rn)\S*f32|\.ftz|\.f64")
RULE_CASES += [ASGD(2), Ftrl(0.1, 0.1, -0.4), RMSProp(centered=True), Momentum(use_nesterov=True)]


def is_loose(case: tuple[Rule, int, str], ptx: str) -> bool:
    """Whether the kernel may give other bits than the CPU's."""
    rule, _, name = case
    found = {match.group() for match in LOOSE.finditer(ptx)}
    if name in ("fold", "combine"):  # chunks are added in float64
        found.discard(".f64")
    if any("math.pow" in inspect.getsource(function) for function in functions_of(rule)):
        return False  # docs/gpu.md: the device's power function is another one
    return bool(found)


def main() -> int:
    """Compile everything; say what is wrong."""
    compiled = {
        (rule, dim, name): ptx
        for rule in RULE_CASES
        for dim in (0, 16)
        for name, ptx in compile_ptx(rule, dim).items()
    }
    wrong = [case for case, ptx in compiled.items() if ".entry" not in ptx or is_loose(case, ptx)]
    print(f"{len(compiled)} kernels, no entry or other bits than the CPU's: {wrong}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
