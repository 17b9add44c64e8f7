"""Run in a process of its own: compiles every rule's CUDA kernels, with no device and no driver."""

import sys

from psfleet.kernels.cuda_ptx import compile_ptx
from psfleet.rules import ASGD, RULES, Ftrl, Momentum, RMSProp, Rule

RULE_CASES: list[Rule] = [rule() for rule in RULES.values()]
RULE_CASES += [ASGD(2), Ftrl(0.1, 0.1, -0.4), RMSProp(centered=True), Momentum(use_nesterov=True)]


def main() -> int:
    """Compile everything; say what is wrong."""
    compiled = {
        (rule.name, dim, name): ptx
        for rule in RULE_CASES
        for dim in (0, 16)
        for name, ptx in compile_ptx(rule, dim).items()
    }
    wrong = [
        case
        for case, ptx in compiled.items()
        if ".entry" not in ptx or (case[2] == "update" and ".f64" in ptx)
    ]
    print(f"{len(compiled)} kernels, float64 or no entry: {wrong}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
