"""The rules that tests of CUDA kernels try, and those of which each has another shape of kernel."""

import os

from psfleet.core.engine.rules import (
    ASGD,
    RULES,
    SGD,
    Adam,
    Ftrl,
    Lamb,
    Momentum,
    RMSProp,
    RowWiseAdagrad,
    Rule,
)

IS_FULL = "PSFLEET_TORTURE" in os.environ
RULE_CASES: list[Rule] = [rule() for rule in RULES.values()]
RULE_CASES += [ASGD(2), RMSProp(centered=True), Momentum(use_nesterov=True)]
# A device has another math.pow, whose last bit may differ.
POWER_CASES: list[Rule] = [Ftrl(0.1, 0.1, -0.4)]
SHAPES = (SGD, Adam, ASGD, Lamb, RowWiseAdagrad)  # elements alone, slots of a unit, sums over all
