"""Generated kernels against their NumPy twin, bit for bit."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from psfleet.kernels.reference import twin_push
from psfleet.rules import ASGD, RULES, Adam, DGCMomentum, Ftrl, Momentum, RMSProp, Rule
from psfleet.schema.table import Decay, TableSpec
from psfleet.tables.dense import DenseTable
from psfleet.tables.sparse import SparseTable

VARIANTS: dict[str, Rule] = {
    "asgd_of_3": ASGD(3),
    "nesterov": Momentum(use_nesterov=True),
    "centered": RMSProp(centered=True),
    "momentum_rmsprop": RMSProp(momentum=0.5),
    "ftrl_l1": Ftrl(0.3, 0.2),
    "dgc_of_2": DGCMomentum(0.9, 2),
    "ftrl_power": Ftrl(0.1, 0.1, -0.4),
}
RULE_CASES = {**{name: rule() for name, rule in RULES.items()}, **VARIANTS}
DECAYS = {"plain": Decay(), "l2": Decay(l2=0.1), "l1": Decay(l1=0.2), "both": Decay(0.1, 0.2)}
COMBINATIONS = [(rule, "plain") for rule in RULE_CASES] + [
    (rule, decay)
    for rule in ("sgd", "adam", "lamb", "rowwise_adagrad")
    for decay in ("l2", "l1", "both")
]

Floats = NDArray[np.float32]


def gradients(seed: int, n: int) -> Floats:
    """n values with zeros and both signs among them."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(n).astype(np.float32)
    values[random.random(n) < 0.1] = 0
    return values


def unaligned(values: NDArray[Any]) -> NDArray[Any]:
    """The same values as they lie inside a message: read-only, at an odd address."""
    raw = b"x" + values.tobytes()
    return np.frombuffer(raw, values.dtype, offset=1).reshape(values.shape)


@pytest.mark.parametrize(("name", "decay"), COMBINATIONS)
def test_dense_kernel_equals_twin(name: str, decay: str) -> None:
    """Weights and every slot are the twin's bits, for any size."""
    rule, spread = RULE_CASES[name], DECAYS[decay]

    @settings(max_examples=8, deadline=None)
    @given(
        n=st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, 600])),
        seed=st.integers(0, 1000),
        rate=st.floats(1e-4, 2),
    )
    def check(n: int, seed: int, rate: float) -> None:
        start = gradients(seed, n)
        table = DenseTable(TableSpec("t", "dense", (n,), rule, spread), start)
        twin = [start.copy(), *(np.full(n, s.initial, np.float32) for s in rule.slots)]
        for step in range(1, 4):
            gradient = gradients(seed + step, n)
            table.push(unaligned(gradient), rate)
            twin_push(rule, spread, rate, step, twin, gradient, 1 if rule.unit == "row" else n)
        for got, wanted in zip(table.state(), twin, strict=True):
            np.testing.assert_array_equal(got, wanted)

    check()


@pytest.mark.parametrize("name", ["lamb", "lars_momentum"])
def test_norms_over_several_chunks(name: str) -> None:
    """The sum over a parameter has the twin's order beyond one chunk too."""
    n, rule = 2 * 4096 + 300, RULE_CASES[name]
    start, gradient = gradients(1, n), gradients(2, n)
    table = DenseTable(TableSpec("t", "dense", (n,), rule), start)
    twin = [start.copy(), *(np.zeros(n, np.float32) for _ in rule.slots)]
    table.push(gradient, 0.1)
    twin_push(rule, Decay(), 0.1, 1, twin, gradient, n)
    for got, wanted in zip(table.state(), twin, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("name", "dim", "every_row"),
    [
        *((name, 5, True) for name in RULE_CASES),
        ("adam", 16, False),
        ("adam", 1, False),
        ("rowwise_adagrad", 300, False),
        ("lamb", 5, False),
        ("asgd_of_3", 5, False),
    ],
)
def test_sparse_rows_equal_dense(name: str, dim: int, every_row: bool) -> None:
    """A sparse table gives the bits of a dense one: with all ids touched or, `every_row`, with some.

    A rule over the whole parameter is compared on a table of one row.
    """
    rule = RULE_CASES[name]
    count = 1 if rule.unit == "parameter" else 20
    random = np.random.default_rng(3)
    ids = np.unique(random.integers(-(2**63), 2**63 - 1, count))
    sparse = SparseTable(TableSpec("t", "sparse", (dim,), rule, every_row=every_row))
    start = np.empty((count, dim), np.float32)
    sparse.pull_into(ids, start)
    dense = DenseTable(TableSpec("t", "dense", (count, dim), rule), start.reshape(-1))
    for step in range(5):
        gradient = gradients(step, count * dim).reshape(count, dim)
        chosen = random.permutation(count)[: count // 2 if every_row and step else count]
        rest = np.setdiff1d(np.arange(count), chosen)
        gradient[rest] = 0
        sparse.push(unaligned(ids[chosen]), unaligned(gradient[chosen]), 0.1)
        dense.push(gradient.reshape(-1), 0.1)
    order = np.argsort(ids)
    got_ids, rows = sparse.state(0, count)
    np.testing.assert_array_equal(got_ids, ids[order])
    for place, wanted in enumerate(dense.state()):
        got = rows[:, place * dim : (place + 1) * dim]
        np.testing.assert_array_equal(got, wanted.reshape(count, dim)[order])


def test_resting_rows_equal_twin() -> None:
    """Rows that a step does not name get the rule's numbers for rows at rest, bit for bit."""
    rule, dim, rate = Adam(0.8, 0.95, 1e-2, unscaled_rest=True), 5, np.float32(0.1)
    table = SparseTable(TableSpec("t", "sparse", (dim,), rule, every_row=True))
    ids = np.arange(6)
    start = np.empty((6, dim), np.float32)
    table.pull_into(ids, start)
    twin = [start, np.zeros_like(start), np.zeros_like(start)]
    for step in range(1, 6):
        named = ids if step == 1 else np.array([step % 5, 5])
        gradient = gradients(step, len(named) * dim).reshape(-1, dim)
        table.push(named, gradient, float(rate))
        for row in ids:
            unit, at = [values[row] for values in twin], np.flatnonzero(named == row)
            given = gradient[at[0]] if len(at) else np.zeros(dim, np.float32)
            twin_push(rule, Decay(), float(rate), step, unit, given, dim, resting=not len(at))
    _, rows = table.state(0, 6)
    np.testing.assert_array_equal(rows, np.concatenate(twin, axis=1))


@pytest.mark.parametrize("name", [n for n, rule in RULE_CASES.items() if rule.unit == "element"])
@settings(max_examples=5, deadline=None)
@given(cuts=st.lists(st.integers(0, 300), max_size=3), seed=st.integers(0, 99))
def test_any_split_gives_the_same_bits(name: str, cuts: list[int], seed: int) -> None:
    """Cut over several servers, a dense array ends with the bits it has on one."""
    rule, n = RULE_CASES[name], 300
    spec = TableSpec("t", "dense", (n,), rule)
    start, ends = gradients(seed, n), [0, *sorted(cuts), n]
    whole = DenseTable(spec, start)
    parts = [DenseTable(spec, start[a:b]) for a, b in pairwise(ends)]
    for step in range(3):
        gradient = gradients(seed + step, n)
        whole.push(gradient, 0.1)
        for part, (a, b) in zip(parts, pairwise(ends), strict=True):
            part.push(gradient[a:b], 0.1)
    joined = [np.concatenate(pieces) for pieces in zip(*(p.state() for p in parts), strict=True)]
    for got, wanted in zip(joined, whole.state(), strict=True):
        np.testing.assert_array_equal(got, wanted)
