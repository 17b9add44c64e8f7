"""Conformance test of update rules: call `check_rule` in the tests of a new rule.

A rule is one scalar function, but psfleet runs it in many forms: compiled for dense arrays and for rows, on
parts of an array, on several servers, on a GPU, and again from a snapshot. All forms must give
bit-identical results. The test compares each form with `twin_push`, which applies the scalar function in
NumPy, one weight after the other. All rules of psfleet pass the test.
"""

import math
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.device.cuda_text import CudaSource
from psfleet.core.engine.kernels.rule_twin import twin_push
from psfleet.core.engine.rules import make_rule, reference_of
from psfleet.core.engine.rules.rule import Rule, check_functions
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import DecaySpec, TableSpec
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime

Floats = NDArray[np.float32]

_SIZES = (0, 1, 5, 16, 70, 257)
_STEPS = (1, 2, 3, 1000, 10_000_000)
_RATE = 0.1


def check_rule(rule: Rule) -> None:
    """Check that a rule has all properties that tables, kernels, messages and snapshots rely on.

        def test_my_rule() -> None:
            check_rule(MyRule(momentum=0.9))

    - The rule can be sent to a server as a name and numbers, and its constants for a step are always the
      same.
    - Its kernels for dense arrays and for rows are bit-identical to the same functions in NumPy, with and
      without weight decay, also for gradients that are infinite or NaN.
    - An array that is divided over several servers gets the same bits as an undivided one.
    - Gradients of repeated ids are summed. Training from a saved and restored state is bit-identical.
    - Its CUDA kernels can be generated and, if numba-cuda finds a device, compile to float32 arithmetic.

    The check compiles four kernels, which takes some seconds.

    Args:
        rule: Rule to check.

    Raises:
        RuleError: A function of the rule cannot be compiled to a kernel.
        AssertionError: The rule lacks one of these properties. The message names the check.
    """
    check_functions(rule)
    _check_numbers(rule)
    for decay in (DecaySpec(), DecaySpec(0.1, 0.2)):
        for size in _SIZES:
            check_dense(rule, decay, size)
    for every_row in (False, True):
        check_rows(rule, 5, every_row)
    check_split(rule, [3, 100, 100])
    _check_states(rule)
    _check_cuda(rule)


def check_dense(
    rule: Rule, decay: DecaySpec, size: int, seed: int = 0, learning_rate: float = _RATE
) -> None:
    """Check that a dense table of `size` weights is bit-identical to its computation in NumPy after 3
    steps."""
    start = gradients(seed, size)
    table = DenseTable(TableSpec("t", "dense", (size,), rule, decay), start)
    twin = [start.copy(), *(np.full(size, slot.initial, np.float32) for slot in rule.slots)]
    for step in range(1, 4):
        gradient = gradients(seed + step, size)
        if step == 3 and size:
            gradient[size // 2] = np.nan
        table.push(_unaligned(gradient), learning_rate)
        width = 1 if rule.unit == "row" else size
        twin_push(rule, decay, learning_rate, step, twin, gradient, width)
    _same(rule, f"dense kernel for {size} weights, {decay}", table.state(), twin)


def check_rows(rule: Rule, dim: int, every_row: bool, count: int = 12) -> None:
    """Check that rows are bit-identical to their computation in NumPy after 5 pushes to some of the rows.

    Args:
        rule: Rule to check.
        dim: Number of weights of a row.
        every_row: True if a push updates rows without a gradient too.
        count: Number of rows.
    """
    table = SparseTable(TableSpec("t", "sparse", (dim,), rule, every_row=every_row))
    random = np.random.default_rng(3)
    ids = np.unique(random.integers(-(2**63), 2**63 - 1, count))
    start = np.empty((len(ids), dim), np.float32)
    table.pull_into(ids, start)
    twin = [start, *(np.full_like(start, slot.initial) for slot in rule.slots)]
    for step in range(1, 6):
        rows_of_step = random.permutation(len(ids))[: len(ids) if step == 1 else len(ids) // 2]
        gradient = gradients(step, len(rows_of_step) * dim).reshape(-1, dim)
        table.push(_unaligned(ids[rows_of_step]), _unaligned(gradient), _RATE)
        for row in range(len(ids)):
            at = np.flatnonzero(rows_of_step == row)
            if len(at) or every_row:
                row_gradient = gradient[at[0]] if len(at) else np.zeros(dim, np.float32)
                unit = [values[row] for values in twin]
                twin_push(
                    rule, DecaySpec(), _RATE, step, unit, row_gradient, dim, resting=not len(at)
                )
    _, rows = table.state(0, len(ids))
    _same(rule, f"sparse kernel for rows of {dim}", [rows], [np.concatenate(twin, axis=1)])


def check_split(rule: Rule, cuts: list[int], seed: int = 0, size: int = 300) -> None:
    """Check that a dense array divided over several servers gets the same bits as an undivided one.

    A rule that needs the whole parameter at once (such as a norm over it) is never divided, so nothing is
    checked for it.

    Args:
        rule: Rule to check.
        cuts: Positions at which the array is divided.
        seed: Seed of the gradients.
        size: Number of weights.
    """
    if rule.unit == "parameter":
        return
    ends = [0, *sorted(cuts), size]
    spec, start = TableSpec("t", "dense", (size,), rule), gradients(seed, size)
    whole = DenseTable(spec, start)
    parts = [DenseTable(spec, start[a:b]) for a, b in pairwise(ends)]
    for step in range(3):
        gradient = gradients(seed + step, size)
        whole.push(gradient, _RATE)
        for part, (a, b) in zip(parts, pairwise(ends), strict=True):
            part.push(gradient[a:b], _RATE)
    state = [np.concatenate(slices) for slices in zip(*(p.state() for p in parts), strict=True)]
    _same(rule, "array cut over servers", state, whole.state())


def gradients(seed: int, size: int) -> Floats:
    """Return random gradients for tests, with both signs and about 10 % zeros: float32 [size]."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(size).astype(np.float32)
    values[random.random(size) < 0.1] = 0
    return values


def _check_numbers(rule: Rule) -> None:
    copy = make_rule(reference_of(rule), rule.hyperparameters())
    assert copy == rule, f"{rule} arrives as {copy}; fields must be numbers or bools"
    names = [slot.name for slot in rule.slots]
    assert len(set(names)) == len(names), f"{rule} has two slots of one name: {names}"
    count = len(rule.scalars(_RATE, 1))
    for step in _STEPS:
        for make in (rule.scalars, rule.resting_scalars):
            numbers = make(_RATE, step)
            wrong = len(numbers) != count or any(math.isnan(number) for number in numbers)
            assert not wrong, f"{rule}: the numbers of step {step} are {numbers}, of step 1 {count}"
            assert numbers == make(_RATE, step), f"{rule}: step {step} has other numbers each time"


def _check_states(rule: Rule) -> None:
    """Check pushes with repeated ids, and training from a state that was copied from another runtime."""
    repeated_pair, summed_pair, restored_pair = (_Pair(rule) for _ in range(3))
    ids, distinct = np.array([5, -3, 5, 9, 5]), np.array([-3, 5, 9])
    for step in range(3):
        rows, sums = gradients(step, 25).reshape(5, 5), np.zeros((3, 5), np.float32)
        np.add.at(sums, np.searchsorted(distinct, ids), rows)
        repeated_pair.push(ids, rows)
        summed_pair.push(distinct, sums)
    repeated_pair.compare("repeated ids", summed_pair)
    restored_pair.restore(repeated_pair)
    for pair in (repeated_pair, restored_pair):
        pair.push(distinct, sums)
    repeated_pair.compare("state saved and restored", restored_pair)


class _Pair:
    """Runtime with one dense and one sparse table, both updated by the same rule."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.runtime = EmbeddedRuntime()
        start = gradients(1, 30)
        self.dense = self.runtime.create(TableSpec("d", "dense", (30,), rule), start)
        self.sparse = self.runtime.create(TableSpec("s", "sparse", (5,), rule))

    def push(self, ids: NDArray[np.int64], rows: Floats) -> None:
        """Push gradients of rows, and a fixed gradient for the dense table."""
        dense = Gradient(self.dense, gradients(7, 30), learning_rate=_RATE)
        self.runtime.push([dense, Gradient(self.sparse, rows, ids, learning_rate=_RATE)])

    def restore(self, source: "_Pair") -> None:
        """Set the dense and the sparse table of this pair to the states of those of `source`."""
        for key in (self.dense, self.sparse):
            self.runtime.write_table(key, source.runtime.read_table(key))

    def compare(self, check_name: str, expected_pair: "_Pair") -> None:
        """Check that the tables of both pairs are bit-identical, and that all values are finite."""
        for key in (self.dense, self.sparse):
            actual_state, expected_state = (
                self.runtime.read_table(key),
                expected_pair.runtime.read_table(key),
            )
            assert actual_state.step == expected_state.step, (
                f"{self.rule}: {check_name}: the steps differ"
            )
            _same(self.rule, check_name, actual_state.values, expected_state.values)
            finite = all(np.isfinite(values).all() for values in actual_state.values)
            assert finite, f"{self.rule}: finite gradients lead to values that are not"


def _check_cuda(rule: Rule) -> None:
    for dim in (0, 16):
        compile(CudaSource(rule, True, True, dim).module(), rule.name, "exec")
    if find_spec("numba_cuda") is None:
        return
    from numba import cuda

    if cuda.is_available():  # type: ignore[no-untyped-call]
        from psfleet.core.engine.kernels.device.cuda import compile_ptx

        for dim in (0, 16):
            for name, ptx in compile_ptx(rule, dim).items():
                narrow = name != "update" or ".f64" not in ptx
                assert ".entry" in ptx, f"{rule}: CUDA kernel {name}: no entry"
                assert narrow, f"{rule}: CUDA kernel {name} computes in float64"


def _same(rule: Rule, check_name: str, values: list[Floats], expected_values: list[Floats]) -> None:
    """Compare arrays bit by bit, where any NaN equals any other NaN."""
    names = ["weights", *(slot.name for slot in rule.slots)]
    for name, actual, expected in zip(names, values, expected_values, strict=False):
        message = f"{rule}: {check_name}: {name} differ"
        np.testing.assert_array_equal(actual, expected, message)
        # assert_array_equal treats 0.0 and -0.0 as equal, so compare the signs too.
        clean = ~np.isnan(actual)
        assert np.array_equal(np.signbit(actual[clean]), np.signbit(expected[clean])), message
    assert len(values) == len(expected_values), (
        f"{rule}: {check_name}: {len(values)} arrays, expected {len(expected_values)}"
    )


def _unaligned(values: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of the values that is read-only and at an odd address, like an array inside a message."""
    raw = b"x" + values.tobytes()
    return np.frombuffer(raw, values.dtype, offset=1).reshape(values.shape)
