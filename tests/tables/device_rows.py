"""Sparse tables on the device and in host memory. A program of its own, under the simulator or on a GPU.

Seeded programs of pushes, pulls, removals, time, shrinks and snapshots run on both. What each call says and
what is known of every row afterwards must have the same bits. Each program runs twice: the device has room
for every row, and for a few, so that the others are in host memory. A GPU gives memory by 2 MiB, which is
room for all rows of these programs: `spill` has more.

    python -m tests.tables.device_rows [PART PARTS [SEED]]
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.kernels.device.cuda_arithmetic import SIMULATED
from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.core.engine.rules import (
    ASGD,
    SGD,
    Adagrad,
    Adam,
    Ftrl,
    Lamb,
    Momentum,
    RowWiseAdagrad,
    Rule,
)
from psfleet.core.engine.schema.entry import (
    CapacityEntry,
    CountFilterEntry,
    ProbabilityEntry,
    ShowClickEntry,
    TTLEntry,
)
from psfleet.core.engine.schema.table import DecaySpec, InitializerSpec, TableSpec
from psfleet.core.engine.tables.assigned_weights import refill
from psfleet.core.engine.tables.budget import MemoryBudget
from psfleet.core.engine.tables.device.device_rows import DeviceRowMemory
from psfleet.core.engine.tables.device.tiered_rows import TieredRowMemory
from psfleet.core.engine.tables.row_data import TableChanges
from psfleet.core.engine.tables.sparse import SparseTable
from tests.kernels.rule_cases import IS_FULL, POWER_CASES, RULE_CASES, SHAPES

TRIES_ALL = IS_FULL or not SIMULATED
PLACE = "the GPU's memory"
EDGES = np.array([0, -1, 1, 2**63 - 1, -(2**63)])
ROOMS = (None, 5) if SIMULATED else (None,)
Tables = tuple[SparseTable, SparseTable]
Dice = np.random.Generator
spilled: dict[int | None, int] = {}  # most rows in host memory at a time, by the room on the device


def spec(rule: Rule, dim: int = 5, **more: Any) -> TableSpec:
    start = more.pop("initializer", InitializerSpec("uniform", -0.5, 0.5))
    return TableSpec("t", "sparse", (dim,), rule, initializer=start, seed=11, **more)


ENTRY = (
    CountFilterEntry(2, candidates=40)
    & TTLEntry(steps=6, seconds=4.0)
    & CapacityEntry(rows=24)
    & ShowClickEntry("show", "click", delete_threshold=0.3, delete_after_unseen=2)
)
SHOWS = ShowClickEntry("show", "click", delete_threshold=0.3)
SPECS = [
    # Plain tables of other rules are alike but for their updates: cuda_agreement.py.
    *(spec(rule) for rule in RULE_CASES + POWER_CASES if TRIES_ALL or type(rule) in SHAPES),
    *(spec(rule, decay=DecaySpec(0.1, 0.2)) for rule in (SGD(), Adam())),
    spec(Adam(), every_row=True),
    spec(Adam(epsilon=0.1, unscaled_rest=True), every_row=True),
    spec(ASGD(3), 2, every_row=True),
    spec(Adam(), entry=ENTRY),
    spec(Adam(), entry=CountFilterEntry(1) & CapacityEntry(rows=20)),
    spec(Ftrl(), entry=ProbabilityEntry(0.5), every_row=True),
    spec(Adagrad(), 70, entry=CapacityEntry(rows=21, full="evict")),
    spec(SGD(), initializer=InitializerSpec("constant", -0.0, 0.0)),
    spec(SGD(), initializer=InitializerSpec("normal", 0.1, 2.0)),
    spec(SGD(), initializer=InitializerSpec("truncated", 0.1, 2.0)),
    # Rows in 16 bits: those of tests/tables/test_precision.py, with compiled kernels, and a few more.
    spec(SGD(), 16, precision="bfloat16"),
    spec(Adam(), 7, precision="bfloat16/bfloat16", every_row=True),
    spec(Ftrl(), 16, precision="bfloat16/bfloat16"),
    spec(Momentum(), 33, precision="bfloat16", initializer=InitializerSpec("normal", 0.1, 2.0)),
    spec(Adam(), 7, precision="bfloat16", entry=CapacityEntry(rows=20) & SHOWS),
    spec(Lamb(), 9, precision="bfloat16/bfloat16", decay=DecaySpec(0.1, 0.2)),
]
if TRIES_ALL:  # kernels for the host that nothing else asks for, 1 s of compiling each
    SPECS += [
        spec(SGD(), 1, entry=ENTRY),
        spec(Lamb(), 8, precision="bfloat16"),
        spec(RowWiseAdagrad(), 6, precision="bfloat16"),
        spec(Momentum(), 8, precision="bfloat16/bfloat16", decay=DecaySpec(0.1, 0.2)),
        spec(ASGD(3), 2, precision="bfloat16", every_row=True),
        spec(Adam(), 3, precision="bfloat16/bfloat16", entry=ENTRY),
    ]


def of_all(table: SparseTable) -> list[bytes]:
    """What is known of a table, its rows in the order of their ids."""
    rows, waiting = table.rows(table.ids()), table.candidates()
    arrays: list[NDArray[Any]] = [rows.ids, rows.values, rows.touched, rows.scores]
    arrays += [waiting.ids, *waiting.values.values(), waiting.touched]
    known = (table.clock, len(table), table.waiting, table.dropped, table.admitted, table.traffic)
    return [repr(known).encode(), *(array.tobytes() for array in arrays)]


def some_ids(dice: Dice) -> NDArray[np.int64]:
    """Distinct ids, few enough for the smallest of the tables."""
    ids = np.append(EDGES, np.arange(2, 50))
    return dice.choice(ids, dice.integers(1, 10), replace=False).astype(np.int64)


def push(dice: Dice, table: SparseTable) -> Any:
    for _ in range(3):
        ids = some_ids(dice)
        values = dice.standard_normal((len(ids), table.spec.push_width)).astype(np.float32)
        values[:, table.spec.dim :] = np.abs(values[:, table.spec.dim :])
        table.push(ids, values, 0.1)


def push_mean(dice: Dice, table: SparseTable) -> Any:
    """A round of three pushes, the last one of a single id."""
    parts = [some_ids(dice), some_ids(dice), np.array([7])]
    width = table.spec.push_width
    gradients = [dice.standard_normal((len(ids), width)).astype(np.float32) for ids in parts]
    table.push_mean([*zip(parts, map(np.abs, gradients), strict=True)], 0.1)


def pull(dice: Dice, table: SparseTable) -> Any:
    ids = dice.choice(np.append(EDGES, np.arange(2, 50)), 12)  # some more than once
    out = np.empty((len(ids), table.spec.dim), np.float32)
    table.pull_into(ids, out)
    return out.tobytes()


def remove(dice: Dice, table: SparseTable) -> Any:
    return table.remove(np.append(some_ids(dice), [7, 7]))


def evict(dice: Dice, table: SparseTable) -> Any:
    return table.evict(int(dice.integers(1, 6)))


def tick(dice: Dice, table: SparseTable) -> Any:
    return table.tick(float(dice.choice([0.5, 3.0])))


def shrink(dice: Dice, table: SparseTable) -> Any:
    return table.shrink((None, 0.0, 1.0)[dice.integers(3)], (None, 1)[dice.integers(2)])


def set_back(dice: Dice, table: SparseTable) -> Any:
    """The step is set, as by a snapshot. In host memory a table that updates every row may not go back: it
    knows by their step which rows a push has named."""
    table.restore_step(table.step + 2 if table.spec.every_row else max(table.step - 2, 0))


def read(dice: Dice, table: SparseTable) -> Any:
    page, (ids, values) = table.page(2, 5), table.state(1, 4)
    return [a.tobytes() for a in (page.ids, page.values, ids, values)]


def freeze(dice: Dice, table: SparseTable) -> Any:
    """Rows as they were, of all ids and of some, while pushes, a removal and a shrink go on."""
    views = [table.freeze(), table.freeze(TableChanges(np.unique(some_ids(dice))))]
    mark = table.mark()
    pages = [view.pages() for view in views]
    first = [next(page, {}) for page in pages]
    for change in (push, remove, shrink, push):
        change(dice, table)
    changes = table.changed_since(mark)
    table.release(mark)
    pages_now = [sorted_rows([page, *rest]) for page, rest in zip(first, pages, strict=True)]
    for view in views:
        view.close()
    return [pages_now, changes.ids.tobytes(), changes.removed.tobytes()]


def sorted_rows(pages: list[Any]) -> list[bytes]:
    """The columns of a snapshot, in the order of the ids: pages may have any."""
    joined = {
        name: np.concatenate([page[name] for page in pages if name in page])
        for name in {name for page in pages for name in page}
    }
    order = np.argsort(joined.get("ids", np.zeros(0)))
    rows = [joined[name][order].tobytes() for name in ("ids", "rows", "touched") if name in joined]
    return rows + [joined[name].tobytes() for name in sorted(joined) if "candidate" in name]


STEPS: list[Callable[[Dice, SparseTable], Any]] = [
    push, push, push_mean, pull, remove, evict, tick, shrink, set_back, read, freeze,
]  # fmt: skip


def on_device(spec: TableSpec, room: int | None) -> SparseTable:
    """A table on a device that has room for so many of its rows; None: for all."""
    limit = None
    if room is not None:
        rows = SparseTable(spec, device="cuda")._index
        assert isinstance(rows, TieredRowMemory)
        limit = rows.device.bytes_with(room)
    return SparseTable(spec, device="cuda", device_budget=MemoryBudget(limit, place=PLACE))


def moved(table: SparseTable, again: SparseTable) -> SparseTable:
    """The other table with what a snapshot of this one holds."""
    view = table.freeze()
    refill(again, view.clock, {})
    for page in view.pages():
        refill(again, view.clock, page)
    view.close()
    return again


def run(tables: Tables, seed: int, steps: int, room: int | None) -> str:
    """A program on both; the name of the first step after which they differ, or after which the second one
    has more rows on its device than there is room for."""
    dice = np.random.default_rng(seed)
    for _ in range(steps):
        step, number = STEPS[dice.integers(len(STEPS))], int(dice.integers(2**31))
        said = [step(np.random.default_rng(number), table) for table in tables]
        if said[0] != said[1] or of_all(tables[0]) != of_all(tables[1]):
            return step.__name__
        most = spilled.get(room, 0)
        spilled[room] = max(most, tables[1].spilled)
        if room is not None and len(tables[1]) - tables[1].spilled > room:
            return f"{step.__name__}, too many rows on the device"
    return ""


def differ(number: int, seed: int, room: int | None) -> str:
    """How tables differ, some also after each has taken the other's snapshot; empty: they do not."""
    spec = SPECS[number]
    host, device = SparseTable(spec), on_device(spec, room)
    steps = 8 if spec.entry or spec.every_row else 3
    wrong = run((host, device), seed, steps, room)
    if not wrong and number % 3 == 0:
        there, back = moved(host, on_device(spec, room)), moved(device, SparseTable(spec))
        wrong = run((back, there), seed + 1000, steps // 2, room) and "after a snapshot"
    return wrong and f"{spec.rule} {spec.entry}, room for {room}: {wrong}"


def grow() -> bool:
    """Whether a table has the bits of the host's while its index and rows move to larger places, many rows go
    and others take their slots."""
    tables = [SparseTable(spec(Adam(), 2), device=device) for device in ("cpu", "cuda")]
    dice, equal = np.random.default_rng(3), True
    tables[1].reserve(300)
    for count in (1, 700, 1500, 1500):
        ids = dice.choice(4000, count, replace=False) - 2000
        values = dice.standard_normal((count, 2)).astype(np.float32)
        for table in tables:
            table.push(ids, values, 0.1)
        equal = equal and of_all(tables[0]) == of_all(tables[1])
        gone = {table.remove(ids[::2]) for table in tables}
        equal = equal and len(gone) == 1
    return equal and of_all(tables[0]) == of_all(tables[1])


def stay() -> bool:
    """Whether rows stay where they are while others are added, which takes no more memory than was said."""
    memory, dice = DeviceRowMemory(5, 4000, marks=True), np.random.default_rng(4)
    first = dice.integers(-(2**62), 2**62, 200)
    values = dice.standard_normal((200, 5)).astype(np.float32)
    slots = memory.find_or_add(first, np.ones(200, np.int64))
    memory.scatter(slots, values)
    there, kept = memory.rows, True
    for count in (1, 300, 900, 1700):
        promised = memory.bytes_with(count)
        memory.find_or_add(dice.integers(-(2**62), 2**62, count), np.ones(count, np.int64))
        kept = kept and memory.bytes_with(0) == memory.bytes <= promised
    old = memory.queue.read(there[: 201 * 5]).reshape(-1, 5)
    return bool(kept and (memory.locate(first)[0] == slots).all() and (old[slots] == values).all())


def rebuild_in_place() -> bool:
    """Whether an index knows its ids when its segments become larger or smaller, so that others move to
    either side, over one another's old places."""
    index, dice = DeviceRowMemory(1, 9000, marks=False), np.random.default_rng(5)
    pool, known = dice.integers(-(2**62), 2**62, 24000), dict[int, int]()
    segments = hash_ids(pool) >> np.uint64(56)
    # The first ones grow, then the last ones while the first ones shrink, then those in the middle.
    for low, high in ((0, 60), (130, 256), (50, 140), (20, 21), (0, 256)):
        for one in [*known][: len(known) * 9 // 10]:
            del known[one]
        gone = index.aged(1)[0]
        index.remove(gone[~np.isin(gone, [*known])])
        ids = pool[(segments >= low) & (segments < high)][:2000]
        known |= zip(ids.tolist(), index.find_or_add(ids, np.ones(len(ids), np.int64)), strict=True)
        found, slots, _ = index.aged(1)
        if dict(zip(found.tolist(), slots, strict=True)) != known or len(index) != len(known):
            return False
        if (index.locate(np.array([*known]))[0] != [*known.values()]).any():
            return False
    return True


def come_back() -> bool:
    """Whether the rows pushed the longest time ago are those that leave the device, and come back with the
    next push that names them."""
    table = on_device(spec(Adam(), 3), 8)
    table.reserve(100)
    for first in range(0, 40, 2):
        table.push(np.arange(first, first + 2), np.ones((2, 3), np.float32), 0.1)
    rows = table._index
    assert isinstance(rows, TieredRowMemory)
    newest = (rows.device.locate(np.arange(32, 40))[0] != 0).all() and table.spilled == 32
    table.push(np.arange(2), np.ones((2, 3), np.float32), 0.1)
    back = (rows.device.locate(np.arange(2))[0] != 0).all() and table.spilled == 32
    return bool(newest and back and len(table) == 40)


def spill() -> bool:
    """Whether a table of which most rows find no room on the device has the bits of the host's."""
    count = 3_000 if SIMULATED else 300_000
    plain, device = spec(Adam(), 5), MemoryBudget(100 * count, place=PLACE)
    tables = [SparseTable(plain), SparseTable(plain, device="cuda", device_budget=device)]
    dice = np.random.default_rng(6)
    for _ in range(4):
        ids = dice.choice(4 * count, count, replace=False)
        values = dice.standard_normal((count, 5)).astype(np.float32)
        for table in tables:
            table.push(ids, values, 0.1)
    spills = tables[1].spilled > len(tables[1]) // 4 and device.available_for() >= 0
    return spills and of_all(tables[0]) == of_all(tables[1])


def is_refused() -> bool:
    """Whether a table that has used up its part of the device's memory and of the host's refuses a push and
    stays as it is. Until then it takes no more than its part of either."""
    budget, device = MemoryBudget(400_000), MemoryBudget(90_000, place=PLACE)
    table = SparseTable(spec(Adam(), 3), budget=budget, device="cuda", device_budget=device)
    for count in itertools.count(1500, 1500):
        before = of_all(table)
        ids = np.arange(count)
        try:
            table.push(ids, np.ones((count, 3), np.float32), 0.1)
        except UsageError as error:
            is_told = "'t' was asked to add 1500 rows" in str(error) and of_all(table) == before
            return is_told and table.spilled > 1500
        if budget.available_for() < 0 or device.available_for() < 0:
            return False
    return False


def is_too_small() -> bool:
    """Whether a device without memory for an empty table says so."""
    try:
        SparseTable(spec(Adam()), device="cuda", device_budget=MemoryBudget(9, place=PLACE))
    except UsageError as error:
        return "'t' was asked to be made" in str(error) and PLACE in str(error)
    return False


if __name__ == "__main__":
    part, parts, first = (*map(int, sys.argv[1:]), *(0, 1, 0)[len(sys.argv) - 1 :])  # `first`: seed
    # How much room there is has to do with rows that go, and little with rules and precisions: without
    # PSFLEET_TORTURE those take turns.
    programs = [
        (n, room)
        for n, room in itertools.product(range(len(SPECS)), ROOMS)
        if TRIES_ALL or SPECS[n].entry or (room is None) == (n % 2 == 0)
    ]
    own = programs[part::parts]
    found = [wrong for n, room in own if (wrong := differ(n, n + first, room))]
    checks = [grow, stay, rebuild_in_place, spill, is_too_small]
    checks += [come_back, is_refused] if SIMULATED else []
    found += [check.__name__ for check in checks[part::parts] if not check()]
    print(f"{len(own)} programs, most rows in host memory by room: {spilled}, wrong: {found}")
    sys.exit(bool(found) or spilled[None] > 0 or spilled.get(5, 10) < 10)
