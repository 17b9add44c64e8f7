"""Rows in 16 and 8 bits: what is rounded, how, and that nothing else differs from rows in float32."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.kernels.hashing import GOLDEN, hash_ids
from psfleet.core.engine.kernels.initial_values import initial_rows, initializer_arguments
from psfleet.core.engine.kernels.row_format import RowColumn, RowFormat
from psfleet.core.engine.kernels.rule_twin import twin_push
from psfleet.core.engine.rules import SGD, Adam, make_rule
from psfleet.core.engine.schema.entry import CapacityEntry, ShowClickEntry
from psfleet.core.engine.schema.table import DecaySpec, InitializerSpec, RowPrecision, TableSpec
from psfleet.core.engine.tables.assigned_weights import add_rows, refill, set_rows, weights_of
from psfleet.core.engine.tables.row_data import HistoryPoint, PackedRows
from psfleet.core.engine.tables.sparse import SparseTable

pytestmark = pytest.mark.quick

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
PRECISIONS: list[RowPrecision] = ["bfloat16", "bfloat16/bfloat16", "bfloat16/int8"]
RATE = 0.05


def spec(
    rule: str = "adam", dim: int = 16, precision: RowPrecision = "bfloat16", every_row: bool = False
) -> TableSpec:
    """A table whose first values are of the size of its updates."""
    start = InitializerSpec("uniform", -0.1, 0.1)
    shape = (dim,)
    return TableSpec(
        "t",
        "sparse",
        shape,
        make_rule(rule, {}),
        initializer=start,
        seed=3,
        every_row=every_row,
        precision=precision,
    )


# Few, for each has kernels of its own to compile.
CASES = {
    "weights": spec("sgd", 16, "bfloat16"),
    "every row, odd width": spec("adam", 7, "bfloat16/int8", every_row=True),
    "state in 16 bits": spec("ftrl", 16, "bfloat16/bfloat16"),
    "state in 8 bits": spec("momentum", 33, "bfloat16/int8"),
    "sums over a row": spec("lamb", 16, "bfloat16"),
    "state of a row": spec("rowwise_adagrad", 16, "bfloat16"),
}


def train(table: SparseTable, steps: int, first: int = 0) -> None:
    """Updates of some of 200 ids whose gradients depend on what is pulled."""
    for step in range(first, first + steps):
        dice = np.random.default_rng(step)
        ids = dice.permutation(200)[:120].astype(np.int64) * 7919
        slope = dice.standard_normal((len(ids), table.spec.dim), np.float32)
        table.push(ids, slope + weights_of(table, ids), RATE)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return hash_ids(x.view(np.int64))


def random_bits(table: TableSpec, ids: Ids, width: int, step: int) -> NDArray[np.uint32]:
    """The documented random numbers of an update: uint32 [n, width]."""
    *_, stream = initializer_arguments(table.initializer, table.seed, table.name)
    salt = mix(np.array([(int(stream) + step * GOLDEN) % 2**64], np.uint64))
    base = mix(hash_ids(ids) ^ salt).astype(np.uint32)
    x = base[:, None] + np.arange(width, dtype=np.uint32) * np.uint32(0x9E3779B9)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    mixed: NDArray[np.uint32] = x ^ (x >> np.uint32(16))
    return mixed


def stored(column: RowColumn, values: Floats, random: NDArray[np.uint32]) -> Floats:
    """What a row of values becomes when it is stored, and read again."""
    if column.format == "float32":
        return values
    if column.format == "bfloat16":
        bits = values.view(np.uint32) + (random >> np.uint32(16))
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    most = float(np.abs(values).max())
    if not most:
        return np.zeros_like(values)
    step = 2.0 ** math.ceil(math.log2(most / 127))
    part = (random >> np.uint32(16)) / 65536
    return (np.floor(values.astype(np.float64) / step + part) * step).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_the_rule_in_float32_and_the_documented_rounding(name: str) -> None:
    """Weights and state have the bits of the NumPy twin, rounded with the documented random numbers."""
    made = CASES[name]
    dim, every_row = made.dim, made.every_row
    table, form = SparseTable(made), RowFormat(made.rule, dim, made.precision)
    ids = np.unique(np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 20))
    twin = np.concatenate(
        [
            weights_of(table, ids),
            *(np.full((20, c.count), 0, np.float32) for c in form.columns[1:]),
        ],
        1,
    )
    for step in range(1, 6):
        dice = np.random.default_rng(step)
        chosen = dice.permutation(20)[: 20 if step == 1 else 8]
        gradients = dice.standard_normal((len(chosen), dim), np.float32)
        table.push(ids[chosen], gradients, RATE)
        random = random_bits(made, ids, form.width, step)
        for row in range(20):
            at = np.flatnonzero(chosen == row)
            if len(at) or every_row:
                slope = gradients[at[0]] if len(at) else np.zeros(dim, np.float32)
                parts = [twin[row, c.place : c.place + c.count] for c in form.columns]
                values = [np.broadcast_to(part, dim).copy() for part in parts]
                twin_push(
                    made.rule, DecaySpec(), RATE, step, values, slope, dim, resting=not len(at)
                )
                for column, value in zip(form.columns, values, strict=True):
                    place = slice(column.place, column.place + column.count)
                    twin[row, place] = stored(column, value[: column.count], random[row, place])
    rows = table.rows(ids)
    expected = [
        np.broadcast_to(twin[:, c.place : c.place + c.count], (20, dim)) for c in form.columns
    ]
    np.testing.assert_array_equal(rows.values, np.concatenate(expected, 1))
    np.testing.assert_array_equal(weights_of(table, ids), rows.values[:, :dim])


@pytest.mark.parametrize(
    ("rule", "precision", "size"),
    [
        ("adam", "float32", 192),
        ("adam", "bfloat16", 160),
        ("adam", "bfloat16/bfloat16", 96),
        ("adam", "bfloat16/int8", 84),
        ("adagrad", "bfloat16/int8", 64),
        ("momentum", "bfloat16/int8", 52),
        ("rowwise_adagrad", "bfloat16", 36),
        ("sgd", "bfloat16/int8", 32),
    ],
)
def test_bytes_of_a_row(rule: str, precision: RowPrecision, size: int) -> None:
    """A row of 16 takes what docs/tables.md says."""
    assert 4 * PackedRows(spec(rule, 16, precision)).width == size


def test_a_row_of_one_weight_stays_in_float32() -> None:
    """In 16 bits it would be no smaller, and less exact."""
    for precision in PRECISIONS:
        assert RowFormat(Adam(), 1, precision).plain


def test_first_values_are_the_nearest() -> None:
    """A pull of an unknown id gives the first value that its row will have, whose error is half a step."""
    made = CASES["weights"]
    table, ids = SparseTable(made), np.arange(1000)
    exact = initial_rows(ids, 16, made.initializer, made.seed, made.name)
    before = weights_of(table, ids)
    assert np.abs(before / exact - 1).max() <= 2.0**-8
    table.push(ids, np.zeros((1000, 16), np.float32), RATE)
    np.testing.assert_array_equal(weights_of(table, ids), before)


def test_small_updates_are_not_lost() -> None:
    """400 updates of 2^-12 move a weight of 1 by 400 / 4096 on average; the nearest bfloat16 is always 1."""
    table = SparseTable(replace(CASES["weights"], initializer=InitializerSpec("constant", 1.0)))
    ids = np.arange(1000)
    for _ in range(400):
        table.push(ids, np.full((1000, 16), -1, np.float32), 2.0**-12)
    actual = weights_of(table, ids)
    assert abs(actual.mean() - 1 - 400 / 4096) < 0.001
    assert np.isin(actual * 128, np.arange(128, 256)).all()  # multiples of 2^-7


def test_odd_values() -> None:
    """No finite weight becomes infinite; an infinity stays one, and a NaN shows."""
    table, ids = SparseTable(CASES["state in 8 bits"]), np.arange(64)
    largest = np.finfo(np.float32).max
    for value in (largest, -largest):
        table.push(ids, np.full((64, 33), value, np.float32), 1.0)
        assert np.isfinite(weights_of(table, ids)).all()
        table.remove(ids)
    table.push(ids, np.full((64, 33), np.inf, np.float32), 1.0)
    assert (weights_of(table, ids) == -np.inf).all()
    table.push(ids, np.full((64, 33), np.nan, np.float32), 1.0)
    assert np.isnan(table.rows(ids).values).all()


@pytest.mark.parametrize("name", CASES)
def test_rows_that_are_written_back_keep_their_bits(name: str) -> None:
    """A table filled from another's frozen rows goes on with the same bits, in whatever order."""
    table, other = SparseTable(CASES[name]), SparseTable(CASES[name])
    train(table, 6)
    frozen = table.freeze()
    for page in frozen.pages():
        order = np.argsort(-page["ids"]) if "ids" in page else slice(None)
        refill(other, frozen.clock, {name: column[order] for name, column in page.items()})
    frozen.close()
    for each in (table, other):
        train(each, 4, first=6)
    ids = table.ids()
    np.testing.assert_array_equal(table.rows(ids).values, other.rows(ids).values)
    np.testing.assert_array_equal(table.state(0, 500)[1], other.state(0, 500)[1])


def test_changes_since_a_mark_carry_a_copy_along() -> None:
    """What a delta holds brings a table to the same bits."""
    table, copy = (SparseTable(CASES["state in 8 bits"]) for _ in range(2))
    train(table, 3)
    mark: HistoryPoint = table.mark()
    copy.set_clock(table.clock)
    copy.write(table.rows(table.ids()))
    train(table, 3, first=3)
    table.remove(table.ids()[:5])
    changes = table.changed_since(mark)
    copy.set_clock(table.clock)
    copy.remove(changes.removed)
    copy.write(table.rows(changes.ids))
    np.testing.assert_array_equal(table.ids(), copy.ids())
    np.testing.assert_array_equal(table.rows(table.ids()).values, copy.rows(table.ids()).values)


def test_shows_clicks_and_frequencies_are_exact() -> None:
    """Scores stay in float32: they and the rows that go are those of a table in float32."""
    entry = ShowClickEntry("s", "c") & CapacityEntry(rows=100, policy="lfu")
    both: list[RowPrecision] = ["float32", "bfloat16"]
    tables = [SparseTable(replace(spec("sgd", 16, each), entry=entry)) for each in both]
    for step in range(12):
        dice = np.random.default_rng(step)
        ids = dice.permutation(300)[:60].astype(np.int64)
        values = np.abs(dice.standard_normal((60, 18), np.float32))
        for table in tables:
            table.push(ids, values, RATE)
            table.shrink(threshold=0.0)
    plain, packed = tables
    np.testing.assert_array_equal(plain.ids(), packed.ids())
    ids = plain.ids()
    np.testing.assert_array_equal(plain.rows(ids).scores, packed.rows(ids).scores)
    assert len(ids)


def test_weights_that_are_added_are_rounded_as_by_a_push() -> None:
    """Geo mode adds what workers have learned: small sums are not lost there either."""
    made = replace(CASES["weights"], initializer=InitializerSpec("constant", 1.0))
    one, other = SparseTable(made), SparseTable(made)
    ids = np.arange(500)
    for _ in range(40):
        add_rows(one, ids, np.full((500, 16), 2.0**-10, np.float32))
        other.push(ids, np.full((500, 16), -1, np.float32), 2.0**-10)
    np.testing.assert_array_equal(weights_of(one, ids), weights_of(other, ids))
    assert abs(weights_of(one, ids).mean() - 1 - 40 / 1024) < 0.001


def test_weights_that_are_set_become_the_nearest_and_state_stays() -> None:
    """Half a step at most, ties to even."""
    table = SparseTable(CASES["every row, odd width"])
    train(table, 3)
    ids = table.ids()
    before = table.rows(ids).values
    set_rows(table, ids, np.full((len(ids), 7), 1 + 3 * 2.0**-8, np.float32))
    after = table.rows(ids).values
    assert (after[:, :7] == 1 + 2.0**-6).all()
    np.testing.assert_array_equal(after[:, 7:], before[:, 7:])


def noise(w, g, h):  # type: ignore[no-untyped-def]
    return (w - h[0] * g,)


def test_names_of_a_rule_are_its_own() -> None:
    """A rule's function may be named as one of the rounding, and neither takes the other's place."""

    class Noisy(SGD):  # here, or the tests of all rules would have it too
        name = "noisy"

        def scalar(self) -> Callable[..., tuple[float, ...]]:
            return noise

    tables = [SparseTable(replace(CASES["weights"], rule=rule)) for rule in (SGD(), Noisy())]
    for table in tables:
        train(table, 3)
    one, other = (table.rows(table.ids()).values for table in tables)
    np.testing.assert_array_equal(one, other)


def test_a_limit_in_bytes_counts_what_rows_take() -> None:
    """A capacity in bytes holds more rows in 16 bits."""
    entry = CapacityEntry(bytes=100_000, full="refuse")
    held, both = [], [spec("sgd", 16, "float32"), CASES["weights"]]
    for made in both:
        table = SparseTable(replace(made, entry=entry))
        with pytest.raises(UsageError, match="full"):
            table.push(np.arange(2000), np.zeros((2000, 16), np.float32), RATE)
        rows = 100_000 // (4 * PackedRows(table.spec).width + 34)
        table.push(np.arange(rows), np.zeros((rows, 16), np.float32), RATE)
        held.append(rows)
    assert held[1] > 1.4 * held[0]


def test_rules_without_state_take_any_precision() -> None:
    """An inference model drops the state and keeps the precision of its weights."""
    for precision in PRECISIONS:
        made = replace(spec("adam", 16, precision), rule=SGD())
        assert 4 * PackedRows(made).width == 32
