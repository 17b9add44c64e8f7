"""The conformance test of update rules: psfleet's own pass it, and a user's rule has to."""

import math
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.interface import Gradient
from psfleet.core.engine.kernels.device.cuda_text import CudaSource
from psfleet.core.engine.kernels.rule_twin import twin_push
from psfleet.core.engine.rules import make_rule, reference_of
from psfleet.core.engine.rules.rule import Rule, check_functions
from psfleet.core.engine.schema.table import DecaySpec, TableSpec
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime

Floats = NDArray[np.float32]

_SIZES = (0, 1, 5, 16, 70, 257)
_STEPS = (1, 2, 3, 1000, 10_000_000)
_RATE = 0.1


def check_rule(rule: Rule) -> None:
    """Check that a rule keeps all that tables, kernels, messages and snapshots rely on.

    - It travels as a name and numbers, and its numbers for a batch are the same each time.
    - Its kernels for dense arrays and for rows give the bits of the same functions in NumPy, with and
      without weight decay, also for gradients that are not finite.
    - An array that is cut into parts, and rows of several servers, end with the same bits as one.
    - Repeated ids count as their sum; a state that was saved and restored goes on as if it had not been.
    - Its CUDA kernels can be written, and, where numba-cuda finds a device, compiled in float32.

    It compiles four kernels, in some seconds.

    Raises:
        RuleError: A function of the rule cannot become a kernel.
        AssertionError: The rule does something else; the text says which check found it.
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
    """Check that a dense table of `size` weights has the bits of the NumPy twin for three steps."""
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
    """Check that rows of `dim` weights, some named by each push, have the bits of the NumPy twin.

    Args:
        every_row: Rows without a gradient are updated too.
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
    """Check that a dense array cut over several servers ends with the bits that it has on one.

    Rules over a whole parameter need all of it; for them there is nothing to check.
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
    """float32 [size] with both signs and some zeros, for tests."""
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
    """Repeated ids, and a state that is read and written into tables of another runtime."""
    one, other, third = (_Pair(rule) for _ in range(3))
    ids, distinct = np.array([5, -3, 5, 9, 5]), np.array([-3, 5, 9])
    for step in range(3):
        rows, sums = gradients(step, 25).reshape(5, 5), np.zeros((3, 5), np.float32)
        np.add.at(sums, np.searchsorted(distinct, ids), rows)
        one.push(ids, rows)
        other.push(distinct, sums)
    one.compare("repeated ids", other)
    third.restore(one)
    for pair in (one, third):
        pair.push(distinct, sums)
    one.compare("state saved and restored", third)


class _Pair:
    """A dense and a sparse table under a rule, in a runtime of their own."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.runtime = EmbeddedRuntime()
        start = gradients(1, 30)
        self.dense = self.runtime.create(TableSpec("d", "dense", (30,), rule), start)
        self.sparse = self.runtime.create(TableSpec("s", "sparse", (5,), rule))

    def push(self, ids: NDArray[np.int64], rows: Floats) -> None:
        """Push these rows, and a gradient for the dense table."""
        dense = Gradient(self.dense, gradients(7, 30), learning_rate=_RATE)
        self.runtime.push([dense, Gradient(self.sparse, rows, ids, learning_rate=_RATE)])

    def restore(self, other: "_Pair") -> None:
        """Take the state of another pair."""
        for key in (self.dense, self.sparse):
            self.runtime.write_table(key, other.runtime.read_table(key))

    def compare(self, what: str, other: "_Pair") -> None:
        """Both must have the same bits, all of them finite."""
        for key in (self.dense, self.sparse):
            own, others = self.runtime.read_table(key), other.runtime.read_table(key)
            assert own.step == others.step, f"{self.rule}: {what}: the steps differ"
            _same(self.rule, what, own.values, others.values)
            finite = all(np.isfinite(values).all() for values in own.values)
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


def _same(rule: Rule, what: str, values: list[Floats], others: list[Floats]) -> None:
    """Compare bits; any NaN equals any other."""
    names = ["weights", *(slot.name for slot in rule.slots)]
    for name, one, other in zip(names, values, others, strict=False):
        message = f"{rule}: {what}: {name} differ"
        np.testing.assert_array_equal(one, other, message)
        clean = ~np.isnan(one)
        assert np.array_equal(np.signbit(one[clean]), np.signbit(other[clean])), message
    assert len(values) == len(others), (
        f"{rule}: {what}: {len(values)} arrays, expected {len(others)}"
    )


def _unaligned(values: NDArray[Any]) -> NDArray[Any]:
    """The same values as they lie inside a message: read-only, at an odd address."""
    raw = b"x" + values.tobytes()
    return np.frombuffer(raw, values.dtype, offset=1).reshape(values.shape)
