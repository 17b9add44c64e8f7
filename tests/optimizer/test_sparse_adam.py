"""Sparse Adam in four modes, for rows of a known number and for rows of any id."""

from collections.abc import Iterator

import numpy as np
import pytest

import psfleet
from psfleet.core.engine import rules
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.rules import AdamCatchUp
from psfleet.core.engine.runtime_interface import TableState
from psfleet.core.engine.schema.table import InitializerSpec
from psfleet.core.graph.parameters.binding import tables
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.parameters.parameter_gradients import densify
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.optimizer import Adam, Optimizer

START = InitializerSpec("constant", 0.5)
RATE = 0.01


def rows(name: str, distributed: bool) -> Parameter:
    """Five rows of five, all 0.5."""
    return Parameter(
        name,
        shape=(-1 if distributed else 5, 5),
        sparse=True,
        distributed=distributed,
        initializer=START,
    )


def steps(gaps: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Row 4 has a gradient always, the others after each of the gaps."""
    rng = np.random.default_rng(1)
    for gap in gaps:
        for _ in range(gap):
            yield np.array([4]), rng.normal(size=(1, 5)).astype(np.float32)
        yield np.arange(5), rng.normal(size=(5, 5)).astype(np.float32)


def run(opt: Optimizer, w: Parameter, gaps: list[int]) -> np.ndarray:
    for ids, grads in steps(gaps):
        if w.sparse:
            opt.apply_gradients([(w, SparseGrad(ids, grads))])
        else:
            whole = np.zeros((5, 5), np.float32)
            whole[ids] = grads
            opt.apply_gradients([(w, whole)])
    return w.lookup(np.arange(5)) if w.sparse else w.numpy()


@pytest.mark.parametrize(
    ("gaps", "distributed"),
    [([0, 3, 1], False), ([0, 40, 7, 0, 200], True), ([2, 0, 600, 300], False)],
)
def test_catch_up_is_dense_when_touched(gaps: list[int], distributed: bool) -> None:
    """When every row has just had a gradient, weights and moments are dense Adam's: moments and weights
    to rounding, and the weights' drift to 1e-6 of the rate for each gap beyond the limit.
    """
    dense, error = Adam(RATE), Adam(RATE, sparse_mode="catch-up")
    expected = run(dense, Parameter("d", np.full((5, 5), 0.5)), gaps)
    actual = run(error, rows("s", distributed), gaps)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 + 1e-6 * RATE * len(gaps))
    mine, theirs = error.state_dict(), dense.state_dict()
    for slot in ("moment1", "moment2"):
        np.testing.assert_allclose(mine[f"s.{slot}"], theirs[f"d.{slot}"], rtol=1e-4, atol=1e-8)


def test_modes_differ_between_touches() -> None:
    """While a row waits, full drifts with the dense rule; lazy and catch-up leave it."""
    before, after = {}, {}
    for mode in ("full", "lazy", "catch-up", "dense"):
        w = Parameter("d", np.full((5, 5), 0.5)) if mode == "dense" else rows(mode, True)
        opt = Adam(RATE) if mode == "dense" else Adam(RATE, sparse_mode=mode)
        before[mode] = run(opt, w, [0])[0].copy()
        ids, grads = next(steps([1]))
        opt.apply_gradients(
            [(w, densify(w, SparseGrad(ids, grads)) if mode == "dense" else SparseGrad(ids, grads))]
        )
        after[mode] = (w.numpy() if mode == "dense" else w.lookup(np.arange(5)))[0]
    np.testing.assert_array_equal(after["full"], after["dense"])
    for mode in ("lazy", "catch-up"):
        np.testing.assert_array_equal(after[mode], before[mode])
    assert not np.allclose(after["lazy"], after["dense"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("distributed", [False, True])
def test_reference_mode_is_the_references_formula(distributed: bool) -> None:
    """In float64: the corrections are a step ahead, epsilon is scaled in rows with a gradient and not in the
    others, and moments decay in all rows. Of a known number of rows it is the default, of any id it has to
    be asked for.
    """
    beta1, beta2, epsilon = 0.8, 0.95, 1e-2
    mode = "reference" if distributed else None
    opt, w = Adam(RATE, beta1, beta2, epsilon, sparse_mode=mode), rows("w", distributed)
    model, m, v = np.full((5, 5), 0.5), np.zeros((5, 5)), np.zeros((5, 5))
    for t, (ids, grads) in enumerate(steps([0, 3, 1, 7]), 1):
        opt.apply_gradients([(w, SparseGrad(ids, grads))])
        gradient, scale = np.zeros((5, 5)), np.ones((5, 1))
        root = np.sqrt(1 - beta2 ** (t + 1))
        gradient[ids], scale[ids] = grads, root
        m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
        model -= RATE * root / (1 - beta1 ** (t + 1)) * m / (np.sqrt(v) + epsilon * scale)
        np.testing.assert_allclose(w.lookup(np.arange(5)), model, rtol=0, atol=5e-7)


@pytest.mark.parametrize("step", [2**24 - 2, 2**31 - 2, 2**48 - 2, 2**62 + 12345])
def test_step_counters_are_exact(step: int, fleet: EmbeddedRuntime) -> None:
    """Where float32 or 32-bit counters would stop, the number of missed steps is still right."""
    w, opt = rows("w", True), Adam(RATE, sparse_mode="catch-up")
    ids, grads = np.array([1]), np.ones((1, 5), np.float32)
    opt.apply_gradients([(w, SparseGrad(ids, grads))])
    seat = tables().find(opt, w)
    assert seat is not None
    state = fleet.read_table(seat.key)
    fleet.write_table(seat.key, TableState(step, state.values, state.ids))
    for _ in range(2):
        opt.apply_gradients([(w, SparseGrad(ids, 0 * grads))])
    before = opt.state_dict()["w.moment1"].copy()
    for _ in range(3):
        opt.apply_gradients([(w, SparseGrad(np.array([2]), grads))])
    opt.apply_gradients([(w, SparseGrad(ids, 0 * grads))])
    after = opt.state_dict()["w.moment1"]
    assert opt.state_dict()["w.step"] == step + 6
    np.testing.assert_array_equal(
        after[0], before[0] * np.float32(0.9) * np.float32(0.9) * np.float32(0.9) * np.float32(0.9)
    )


def test_limit_bounds_the_drift() -> None:
    """The drift that the limit leaves out is below 1e-6 of the rate for the worst gradients."""
    rule = AdamCatchUp(0.9, 0.999)
    # Worst case.
    history = np.array([(rule.beta1 / rule.beta2) ** age for age in range(2000)][::-1])
    m = v = 0.0
    for gradient in history:
        m = rule.beta1 * m + (1 - rule.beta1) * gradient
        v = rule.beta2 * v + (1 - rule.beta2) * gradient**2
    left = sum(
        (rule.beta1 / np.sqrt(rule.beta2)) ** j * m / np.sqrt(v)
        for j in range(rule.limit + 1, rule.limit + 2000)
    )
    assert 0 < left < 1e-6


def test_a_pull_lacks_at_most_the_drift() -> None:
    """What a pull gives of a row that rests differs from the dense rule's by less than the bound."""
    bound = AdamCatchUp(0.9, 0.999).drift
    assert 65 < bound < 66
    dense, error = Adam(RATE), Adam(RATE, sparse_mode="catch-up")
    d, s = Parameter("d", np.full((5, 5), 0.5)), rows("s", True)
    rng, every = np.random.default_rng(1), np.arange(5)
    for t in range(100):
        grads = (1.11**t * (0.5 + rng.random((5, 5)))).astype(np.float32)  # near the worst case
        dense.apply_gradients([(d, grads)])
        error.apply_gradients([(s, SparseGrad(every, grads))])
    before = s.lookup(every)
    for ids, grads in steps([1] * 60):
        if len(ids) == 1:
            dense.apply_gradients([(d, densify(d, SparseGrad(ids, grads)))])
            error.apply_gradients([(s, SparseGrad(ids, grads))])
    resting = s.lookup(every)[:4]
    np.testing.assert_array_equal(resting, before[:4])
    lacks = np.abs(resting - d.numpy()[:4]).max()
    assert 20 * RATE < lacks < bound * RATE


@pytest.mark.parametrize("mode", [None, "catch-up"])
def test_dense_tables_follow_the_dense_rule(mode: str | None) -> None:
    """What Adam does otherwise to sparse rows it does not do to a dense table of a client, nor to a sparse
    parameter whose gradient regularization makes dense.
    """
    optimizer = Adam(RATE, sparse_mode=mode)
    assert psfleet.connect().dense_table("d", np.ones(3), optimizer).spec.rule == rules.Adam()
    decayed = Adam(RATE, sparse_mode=mode, weight_decay=0.1)
    assert decayed.rule(rows("w", False)) == rules.Adam()
