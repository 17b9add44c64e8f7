"""CUDA kernels have the bits of the NumPy twin. Run in a process of its own, under the simulator or on a GPU.

python -m tests.kernels.cuda_agreement [PART PARTS]
"""

import sys

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.device.cuda import CudaUpdate
from psfleet.core.engine.kernels.device.cuda_arithmetic import SIMULATED
from psfleet.core.engine.kernels.device.cuda_launch import to_device
from psfleet.core.engine.kernels.device.cuda_queue import DeviceQueue
from psfleet.core.engine.kernels.rule_source import scalars_of
from psfleet.core.engine.kernels.rule_twin import twin_push
from psfleet.core.engine.rules import Adam, Rule
from psfleet.core.engine.schema.table import DecaySpec
from tests.kernels import rule_cases

Floats = NDArray[np.float32]

N, DIM, STEPS = 12, 4, 3
RULE_CASES = rule_cases.RULE_CASES + rule_cases.POWER_CASES * SIMULATED


def agrees(rule: Rule, decay: DecaySpec, sparse: bool, resting: bool = False) -> bool:
    """Whether weights and slots have the same bits as the twin's after some steps."""
    random = np.random.default_rng(0)
    width = DIM if sparse or rule.unit == "row" else N
    shared = [False, *(slot.per_unit for slot in rule.slots)]
    twin = [
        random.standard_normal(N).astype(np.float32),
        *(np.full(N, slot.initial, np.float32) for slot in rule.slots),
    ]
    values, rows = narrow(twin, shared, width), np.array([2, 0, 1])
    table, there = to_device(joined(values)), [to_device(array) for array in values]
    queue = DeviceQueue()
    update = CudaUpdate(rule, decay, queue, DIM if sparse else 0)
    for step in range(1, STEPS + 1):
        gradient = random.standard_normal(N).astype(np.float32)
        scalars = scalars_of(rule, decay, 0.1, step, resting)
        twin_push(rule, decay, 0.1, step, twin, gradient, width, resting)
        if sparse:
            given = gradient.reshape(-1, DIM)[rows]
            sent = to_device(rows), to_device(given)
            update.rows(table, *sent, scalars, step)
        else:
            update.dense(there, to_device(gradient), width, scalars, step)
        queue.finish()
    expected = narrow(twin, shared, width)
    pairs = [(table, joined(expected))] if sparse else list(zip(there, expected, strict=True))
    return all(queue.read(actual).tobytes() == want.tobytes() for actual, want in pairs)


def narrow(values: list[Floats], shared: list[bool], width: int) -> list[Floats]:
    """Copies of the values, those that a unit shares once for each unit."""
    return [
        v[::width].copy() if single else v.copy() for v, single in zip(values, shared, strict=True)
    ]


def joined(values: list[Floats]) -> Floats:
    """Rows as the sparse table keeps them, flat."""
    return np.concatenate([v.reshape(N // DIM, -1) for v in values], axis=1).reshape(-1)


if __name__ == "__main__":
    part, parts = (*map(int, sys.argv[1:]), *(0, 1)[len(sys.argv) - 1 :])
    wrong = []
    for rule in RULE_CASES[part::parts]:
        for decay in (DecaySpec(), DecaySpec(0.1, 0.2)):
            for sparse in (False, True):
                if not agrees(rule, decay, sparse):
                    wrong.append(f"{rule} {decay} sparse={sparse}")
    if not part and not agrees(Adam(epsilon=0.1, unscaled_rest=True), DecaySpec(), True, True):
        wrong.append("rows at rest")
    print(f"{len(RULE_CASES[part::parts])} rules, wrong: {wrong}")
    sys.exit(bool(wrong))
