"""Generator of a rule's CUDA kernels, in which each thread updates one weight.

rule_source.py generates the same rule for the CPU. For SGD on rows of 4 weights with l2, the kernel is::

    @cuda.jit
    def update(units, n, turn, gradient, rows, t, extra, h):
        for place in range(cuda.grid(1), units * n, cuda.gridsize(1)):
            unit = place // n
            i = place - unit * n
            w = t[rows[unit] * 4 + 0 + i]
            g = gradient[unit * (n + 0) + i]
            g = g + rounded_product(h[1], w)
            numbers = h[:1]
            w, = sgd(w, g, numbers)
            t[rows[unit] * 4 + 0 + i] = w

Every product becomes `rounded_product`, also in the rule's own functions. Otherwise NVIDIA's compiler would
fuse `a * b + c` into one operation with one rounding, which gives other bits than the CPU (decision 6).

A rule with sums over a unit needs the sums before the first weight can change, and the threads of a kernel do
not wait for each other. So the sums are computed by kernels of their own, `lanes`, `fold` and `combine`, in
the order of additions of the CPU (CHUNK and LANES of rule_source.py).

Dense kernels take an array for the weights and an array for each slot. Sparse kernels take the table's rows
as one flat array and the numbers of the rows that the gradients belong to. `push_scores` scores follow each
gradient and `row_scores` scores each row; these kernels skip the scores, which cuda_rows.py adds.
"""

import ast
from collections.abc import Callable
from functools import partial, reduce
from textwrap import indent
from typing import Any

from psfleet.core.engine.kernels.rule_source import CHUNK, LANES, result_count, sum_count
from psfleet.core.engine.rules.rule import Rule, functions_of, tree_of

_HEAD = """\
import numpy as np
from numba import cuda, float32, float64

from psfleet.core.engine.kernels.device.cuda_arithmetic import first_max, first_min, math, rounded_product

ZERO = np.float32(0)
"""


class CudaSource:
    """Generator of the CUDA kernels of one rule, for dense arrays (`dim` 0) or for rows of `dim` weights.

    The kernels, in the order in which they are launched; `values` are the arrays named in `arguments`::

        lanes(units, n, turn, gradient, *values, sums, h)             for each lane of each chunk
        fold(count, sums, totals)                                     for each sum of each chunk
        combine(units, n, turn, *values, totals, extra, h)            for each unit
        update(units, n, turn, gradient, *values, extra, h)           for each weight

    A rule without sums has no `lanes` and no `fold`. It has no `combine` either unless a unit shares a slot.
    Kernels loop with the number of launched threads as their stride, so any number of threads will do.

    `extra`, float32 [units, extra_width], has the values that `combine` appends to h for each unit, and the
    values of the unit's shared slots before the update. The shared slots must be saved there, because thread
    0 of a unit may store a new value while other threads of the unit have still to read the old value.

    Attributes:
        sums: Number of sums over a unit.
        extras: Number of values that `combine` appends to h.
        extra_width: Number of values of `extra` for each unit.
        arguments: Names of the arrays of weights and state that the kernels take.
    """

    def __init__(
        self, rule: Rule, l1: bool, l2: bool, dim: int, push_scores: int = 0, row_scores: int = 0
    ) -> None:
        self._rule, self._l1, self._l2, self._dim = rule, l1, l2, dim
        self._push_scores, self._row_scores = push_scores, row_scores
        self._numbers = len(rule.scalars(0.1, 1))
        self._slots = rule.slots[: len(rule.slots) - max(rule.turns - 1, 0)]
        combine = rule.combine()
        self._advances = rule.advance() is not None
        self.sums = sum_count(rule)
        self.extras = result_count(combine, 2 + self.sums) if combine else 0
        self._single = [i for i, slot in enumerate(self._slots) if slot.per_unit]
        self.extra_width = self.extras + len(self._single)
        self.arguments = (
            ["rows", "t"] if dim else ["p", *(f"p{i}" for i in range(len(self._slots)))]
        )

    def module(self) -> str:
        """Return the text of the module: the rule's functions, then its kernels."""
        rule = self._rule
        parts = [
            _HEAD,
            *(
                "\n@cuda.jit(device=True, inline='always')\n" + _device_source(f)
                for f in functions_of(rule)
            ),
            self._update(),
        ]
        if self.sums:
            parts += [self._lanes(), self._fold()]
        if self.extra_width:
            parts.append(self._combine())
        return "\n".join(parts)

    @property
    def stride(self) -> int:
        """Number of float32 of a row of the sparse table: weights, state and scores."""
        state = sum(1 if slot.per_unit else self._dim for slot in self._rule.slots)
        return self._dim + state + self._row_scores

    def _place(self, slot: int, unit: str, i: str) -> str:
        """Return an expression for an element of the arrays: a weight, or a slot's value for the weight.

        Args:
            slot: Number of the slot, or -1 for the weight itself.
            unit: Expression for the number of the unit.
            i: Expression for the weight's number in its unit.
        """
        single = slot >= 0 and self._slots[slot].per_unit
        if not self._dim:
            name = "p" if slot < 0 else f"p{slot}"
            return f"{name}[{unit}]" if single else f"{name}[{unit} * n + {i}]"
        offset = sum(1 if s.per_unit else self._dim for s in self._slots[:slot]) + self._dim
        offset = 0 if slot < 0 else offset
        turn = f" + turn * {self._dim}" if self._rule.turns and slot == len(self._slots) - 1 else ""
        return f"t[rows[{unit}] * {self.stride} + {offset}{turn}" + ("]" if single else f" + {i}]")

    def _load(self, saved: bool) -> str:
        """Return statements that load w, g and the slots, and add the regularization to g.

        Args:
            saved: True to load slots that the unit shares from `extra`, where `combine` has saved them.
        """
        lines = [
            f"w = {self._place(-1, 'unit', 'i')}",
            f"g = gradient[unit * (n + {self._push_scores}) + i]",
        ]
        if self._l2:
            lines.append(f"g = g + rounded_product(h[{self._numbers}], w)")
        if self._l1:
            pull = f"h[{self._numbers + self._l2}]"
            lines.append(f"g = g + ({pull} if w > ZERO else (-{pull} if w < ZERO else ZERO))")
        for slot in range(len(self._slots)):
            element = self._place(slot, "unit", "i")
            if saved and slot in self._single:
                element = f"extra[unit, {self.extras + self._single.index(slot)}]"
            lines.append(f"t{slot} = {element}")
        return "\n".join(lines)

    def _store_slots(self) -> list[str]:
        """Return statements that store the slots; weight 0 of a unit stores those that the unit shares."""
        stores = []
        for slot in range(len(self._slots)):
            guard = "if i == 0:\n    " if slot in self._single else ""
            stores.append(f"{guard}{self._place(slot, 'unit', 'i')} = t{slot}")
        return stores

    def _slot_names(self) -> str:
        return "".join(f"t{i}, " for i in range(len(self._slots)))

    def _directed(self) -> str:
        """Return a statement that sets g to the result of the rule's `direction` for the updated slots."""
        direction = self._rule.direction()
        assert direction is not None
        return f"g, = {direction.__name__}(w, {self._slot_names()}h)"

    def _update(self) -> str:
        statement = f"numbers = h[:{self._numbers}]"
        if self.extras:
            statement += " + (" + "".join(f"extra[unit, {k}], " for k in range(self.extras)) + ")"
        # Read shared slots from `extra`, because the thread of weight 0 overwrites them while other threads
        # still need the old values.
        load, names = self._load(saved=True), self._slot_names()
        stores = [f"{self._place(-1, 'unit', 'i')} = w", *self._store_slots()]
        if self._advances:  # `lanes` has already stored the updated slots
            load += f"\n{self._directed()}"
            names, stores = "", stores[:1]
        return f"""
@cuda.jit
def update(units, n, turn, gradient, {", ".join(self.arguments)}, extra, h):
    for place in range(cuda.grid(1), units * n, cuda.gridsize(1)):
        unit = place // n
        i = place - unit * n
{indent(load, " " * 8)}
        {statement}
        w, {names}= {self._rule.scalar().__name__}(w, g, {names}numbers)
{indent(chr(10).join(stores), " " * 8)}
"""

    def _lanes(self) -> str:
        measure, advance = self._rule.measure(), self._rule.advance()
        assert measure is not None
        # A thread sums up one lane of a chunk: values lane, lane + LANES, ... of the chunk, in this order.
        slots, load = self._slot_names(), self._load(saved=False)
        if advance is not None:
            # Each weight belongs to one lane, so its slots are updated exactly once. `update` then reads the
            # updated slots.
            load += f"\n{slots}= {advance.__name__}(w, g, {slots}h)\n"
            load += "\n".join([*self._store_slots(), self._directed()])
            slots = ""
        terms = "".join(f"a{k}, " for k in range(self.sums))
        start = "\n".join(f"s{k} = ZERO" for k in range(self.sums))
        add = "\n".join(f"s{k} += a{k}" for k in range(self.sums))
        store = "\n".join(f"sums[{k}, chunk, lane] = s{k}" for k in range(self.sums))
        return f"""
@cuda.jit
def lanes(units, n, turn, gradient, {", ".join(self.arguments)}, sums, h):
    chunks = (n + {CHUNK - 1}) // {CHUNK}
    for place in range(cuda.grid(1), units * chunks * {LANES}, cuda.gridsize(1)):
        chunk = place // {LANES}
        lane = place - chunk * {LANES}
        unit = chunk // chunks
        first = (chunk - unit * chunks) * {CHUNK}
{indent(start, " " * 8)}
        for i in range(first + lane, min(first + {CHUNK}, n), {LANES}):
{indent(load, " " * 12)}
            {terms}= {measure.__name__}(w, g, {slots}h)
{indent(add, " " * 12)}
{indent(store, " " * 8)}
"""

    def _fold(self) -> str:
        # In halves, as on the CPU: lane j += lane j + half. One thread folds all lanes of a chunk and then
        # widens the sum to float64, in which `combine` adds up the chunks.
        return f"""
@cuda.jit
def fold(count, sums, totals):
    for place in range(cuda.grid(1), {self.sums} * count, cuda.gridsize(1)):
        k = place // count
        chunk = place - k * count
        half = {LANES // 2}
        while half >= 1:
            for j in range(half):
                sums[k, chunk, j] += sums[k, chunk, half + j]
            half //= 2
        totals[k, chunk] = float64(sums[k, chunk, 0])
"""

    def _combine(self) -> str:
        combine = self._rule.combine()
        start = "\n".join(f"s{k} = float64(0)" for k in range(self.sums))
        add = "\n".join(f"s{k} += totals[{k}, chunk]" for k in range(self.sums))
        values = "".join(f"float32(s{k}), " for k in range(self.sums))
        call = ""
        if combine is not None:
            results = "".join(f"e{k}, " for k in range(self.extras))
            call = f"        {results}= {combine.__name__}({values}float32(n), h)"
        store = [f"extra[unit, {k}] = e{k}" for k in range(self.extras)]
        store += [
            f"extra[unit, {self.extras + k}] = {self._place(slot, 'unit', '0')}"
            for k, slot in enumerate(self._single)
        ]
        return f"""
@cuda.jit
def combine(units, n, turn, {", ".join(self.arguments)}, totals, extra, h):
    for unit in range(cuda.grid(1), units, cuda.gridsize(1)):
        chunks = (n + {CHUNK - 1}) // {CHUNK}
{indent(start, " " * 8)}
        for chunk in range(unit * chunks, (unit + 1) * chunks):
{indent(add or "pass", " " * 12)}
{call}
{indent(chr(10).join(store), " " * 8)}
"""


def _device_source(function: Callable[..., Any]) -> str:
    """Return the source of a rule's function after `Rounded` has replaced its products, max and min."""
    return ast.unparse(Rounded().visit(tree_of(function))) + "\n"


class Rounded(ast.NodeTransformer):
    """Replaces operations that give other bits on a device than on the CPU by calls of cuda_arithmetic.py.

    A product, a * b or a *= b, becomes `rounded_product(a, b)`, which is not fused with a sum. max and min
    become `first_max` and `first_min`, which return what Python's do: the first argument unless the second is
    greater (or less). max and min of a device differ for NaN, where they return the other argument, and for 0
    and -0.

    >>> ast.unparse(Rounded().visit(ast.parse("y = max(a * b, c)")))
    'y = first_max(rounded_product(a, b), c)'
    """

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return _rounded(node.left, node.right) if isinstance(node.op, ast.Mult) else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Name) and node.func.id in ("max", "min")):
            return node
        return reduce(partial(_called, f"first_{node.func.id}"), node.args)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not (isinstance(node.op, ast.Mult) and isinstance(node.target, ast.Name)):
            return node
        factor = ast.Name(node.target.id, ast.Load())
        return ast.Assign([node.target], _rounded(factor, node.value), lineno=node.lineno)


def _rounded(left: ast.expr, right: ast.expr) -> ast.Call:
    return _called("rounded_product", left, right)


def _called(name: str, left: ast.expr, right: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [left, right], [])
