"""Run in a process of its own: compiles every rule's CUDA kernels, with no device and no driver."""
# mypy: disable-error-code="no-untyped-call,attr-defined"

import sys
from typing import Any

from numba import cuda, float32, float64, int64, types, void

from psfleet.kernels.cuda import cuda_kernels
from psfleet.rules import ASGD, RULES, Ftrl, Momentum, RMSProp, Rule

RULE_CASES: list[Rule] = [rule() for rule in RULES.values()]
RULE_CASES += [ASGD(2), Ftrl(0.1, 0.1, -0.4), RMSProp(centered=True), Momentum(use_nesterov=True)]
FLAT, SUMS, TOTALS, EXTRA = float32[::1], float32[:, :, ::1], float64[:, ::1], float32[:, ::1]


def signatures(rule: Rule, dim: int) -> dict[str, Any]:
    """The kernels of a rule and their signatures."""
    text, _ = cuda_kernels(rule, True, True, dim)
    values = [int64[::1], FLAT] if dim else [FLAT] * len(text.arguments)
    h = types.UniTuple(float32, len(rule.scalars(0.1, 1)) + 2)
    found = {"update": void(int64, int64, int64, FLAT, *values, EXTRA, h)}
    if text.sums:
        found["lanes"] = void(int64, int64, int64, FLAT, *values, SUMS, h)
        found["fold"] = void(int64, SUMS, TOTALS)
    if text.extra_width:
        found["combine"] = void(int64, int64, int64, *values, TOTALS, EXTRA, h)
    return found


def main() -> int:
    """Compile everything; say what is wrong."""
    wrong, count = [], 0
    for rule in RULE_CASES:
        for dim in (0, 16):
            _, kernels = cuda_kernels(rule, True, True, dim)
            for name, signature in signatures(rule, dim).items():
                ptx, _ = cuda.compile(
                    getattr(kernels, name).py_func,
                    signature,
                    device=False,
                    cc=(9, 0),
                    output="ptx",
                    abi="numba",
                )
                count += 1
                if ".entry" not in ptx or (name == "update" and ".f64" in ptx):
                    wrong.append(f"{rule.name} dim={dim} {name}: float64 or no entry")
    print(f"{count} kernels, wrong: {wrong}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
