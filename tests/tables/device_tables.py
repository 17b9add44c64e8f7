"""Run in a process of its own with NUMBA_ENABLE_CUDASIM=1: dense tables on the device and in host memory."""

import sys

import numpy as np
from numpy.typing import NDArray

from psfleet.rules import ASGD, RULES, Ftrl, Momentum, RMSProp, Rule
from psfleet.schema.table import DecaySpec, TableSpec
from psfleet.tables.dense import DenseTable

SHAPE = (3, 4)
RULE_CASES: list[Rule] = [rule() for rule in RULES.values()]
RULE_CASES += [ASGD(2), Ftrl(0.1, 0.1, -0.4), RMSProp(centered=True), Momentum(use_nesterov=True)]


def bits(table: DenseTable) -> list[bytes]:
    """What is known of a table: its step, its state, its weights as a pull gives them, and a part."""
    pulled = np.empty(table.count, np.float32)
    table.pull_into(pulled)
    step, part = table.part(2, 7)
    return [
        str(step).encode(),
        *(a.tobytes() for a in table.state()),
        pulled.tobytes(),
        part.tobytes(),
    ]


def frozen(table: DenseTable, gradient: NDArray[np.float32]) -> list[bytes]:
    """What a view of now says after an update."""
    view = table.freeze()
    table.push(gradient, 0.1)
    found = [array.tobytes() for page in view.pages() for array in page.values()]
    view.close()
    return found


def same(rule: Rule) -> bool:
    """Whether both do the same, also when one takes over the other's state."""
    spec = TableSpec("t", "dense", SHAPE, rule, DecaySpec(0.1, 0.2))
    random = np.random.default_rng(0)
    start, *gradients = random.standard_normal((5, 12)).astype(np.float32)
    host, device = DenseTable(spec, start), DenseTable(spec, start, "cuda")
    for gradient in gradients[:2]:
        host.push(gradient, 0.1)
        device.push(gradient, 0.1)
    equal = bits(host) == bits(device) and frozen(host, gradients[2]) == frozen(
        device, gradients[2]
    )
    moved = DenseTable(spec, start, "cuda")
    moved.restore(host.step, host.state())
    back = DenseTable(spec, start)
    back.restore(device.step, device.state())
    for table in (host, device, moved, back):
        table.push(gradients[3], 0.1)
    return equal and bits(host) == bits(device) == bits(moved) == bits(back)


if __name__ == "__main__":
    wrong = [str(rule) for rule in RULE_CASES if not same(rule)]
    empty = DenseTable(TableSpec("e", "dense", (0,), Momentum()), np.zeros(0, np.float32), "cuda")
    empty.push(np.zeros(0, np.float32), 0.1)
    print(f"{len(RULE_CASES)} rules, wrong: {wrong}")
    sys.exit(bool(wrong) or empty.count)
