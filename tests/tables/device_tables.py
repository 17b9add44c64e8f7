"""Dense tables on the device and in host memory. A program of its own, under the simulator or on a GPU.

python -m tests.tables.device_tables [PART PARTS]
"""

import sys

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.kernels.device.cuda_arithmetic import SIMULATED
from psfleet.core.engine.rules import SGD, Adam, Momentum, Rule
from psfleet.core.engine.schema.table import DecaySpec, Device, TableSpec
from psfleet.core.engine.shard.shard_tables import ShardTables
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.memory_choice import KINDS, MemoryChoice
from tests.kernels import rule_cases

SHAPE = (3, 4)
THOUSAND = 1000 if SIMULATED else 1_000_000  # a GPU gives rows memory by 2 MiB
RULE_CASES = rule_cases.RULE_CASES + rule_cases.POWER_CASES * SIMULATED


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
    contents = [array.tobytes() for page in view.pages() for array in page.values()]
    view.close()
    return contents


def same(rule: Rule) -> bool:
    """Whether both do the same, also when one takes over the other's state.

    Kernels with weight decay, of every rule, are those of tests/kernels/cuda_agreement.py; here two have it.
    """
    decay = DecaySpec(0.1, 0.2) if rule.name in ("sgd", "lamb") else DecaySpec()
    spec = TableSpec("t", "dense", SHAPE, rule, decay)
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


def tables_with(memory: int, is_auto: bool) -> ShardTables:
    """Tables of a server that may take so many bytes of its device."""
    tables = ShardTables(0, 1)
    tables.choice = MemoryChoice("cuda", True, {"cuda": memory}, is_auto)
    return tables


def dense(name: str, count: int, device: Device | None = None) -> TableSpec:
    return TableSpec(name, "dense", (count,), Adam(), device=device)


def is_refused(tables: ShardTables, spec: TableSpec) -> bool:
    """Whether a table is refused with its name, what it needs, and what to do."""
    try:
        tables.make(spec, np.zeros(spec.size, np.float32))
    except UsageError as error:
        message = f"table {spec.name!r} was asked to be made, for which it needs "
        return (
            message in str(error)
            and "of the GPU's memory" in str(error)
            and "--device" in str(error)
        )
    return False


def shares_its_budget() -> bool:
    """Whether dense tables take their part of the device's memory, with room for their gradients, and no
    more. Rows that come later are in host memory when there is none left."""
    spec, zeros = dense("first", THOUSAND), np.zeros(THOUSAND, np.float32)
    need = 4 * 5 * THOUSAND  # weights, two moments, two gradients
    tables = tables_with(need + 40 * THOUSAND, is_auto=False)
    rows = tables.make(TableSpec("rows", "sparse", (2,), SGD()), zeros[:0])
    there = tables.make(spec, zeros)
    counted = there.bytes == there.device_bytes == need == KINDS["cuda"].dense_bytes(spec, THOUSAND)
    counted = (
        counted and tables.budgets["cuda"].available_for() == 40 * THOUSAND - rows.device_bytes
    )
    ids = np.arange(3 * THOUSAND)
    rows.push(ids, np.ones((len(ids), 2), np.float32), 0.1)  # type: ignore[call-arg, arg-type]
    spills = rows.spilled > THOUSAND and tables.budgets["cuda"].available_for() >= 0  # type: ignore[union-attr]
    return counted and spills and is_refused(tables, dense("second", THOUSAND))


def moves_to_the_host() -> bool:
    """Whether a dense table for which the device has no room is in host memory if the setting is auto and it
    names no device, or if it was made before; it is refused otherwise, and nothing is taken."""
    zeros = np.zeros(1000, np.float32)
    automatic, strict = tables_with(16_000, is_auto=True), tables_with(16_000, is_auto=False)
    table = automatic.make(dense("any", 1000), zeros)
    before = strict.make(dense("before", 1000, "cuda"), zeros, may_refuse=False)
    right = table.device == before.device == "cpu" and table.device_bytes == 0
    right = right and automatic.make(dense("small", 500), zeros[:500]).device == "cuda"
    right = right and is_refused(automatic, dense("named", 1000, "cuda"))
    right = right and is_refused(strict, dense("any", 1000))
    return right and strict.budgets["cuda"].available_for() == 16_000


if __name__ == "__main__":
    part, parts = (*map(int, sys.argv[1:]), *(0, 1)[len(sys.argv) - 1 :])
    wrong = [str(rule) for rule in RULE_CASES[part::parts] if not same(rule)]
    empty = DenseTable(TableSpec("e", "dense", (0,), Momentum()), np.zeros(0, np.float32), "cuda")
    empty.push(np.zeros(0, np.float32), 0.1)
    checks = (shares_its_budget, moves_to_the_host)
    wrong += [check.__name__ for check in checks[part::parts] if not check()]
    print(f"{len(RULE_CASES[part::parts])} rules, wrong: {wrong}")
    sys.exit(bool(wrong) or empty.count)
