"""Generator of `apply`, the part of an update kernel that applies an optimizer's rule to one unit of weights.

`RuleSource` turns a rule's scalar functions into Python text, which generate.py inserts into the templates of
`sources/`. Open this file to see the code that numba compiles for a rule. For SGD on rows of 4 weights with
l2, the text of `apply` is::

    @helper
    def apply(n, gradient, lanes, p, turn, h):
        l2 = h[1]
        for i in range(4):
            w = load_f32(p, i)
            g = read_f32(gradient, i)
            g = g + l2 * w
            w, = sgd(w, g, h)
            store_f32(p, i, w)

A unit is the weights that share sums and state values (`Rule.unit`): a row, for example. A rule with sums
over the unit (Lamb's norms, say) also has a function `combined`, which `apply` calls first. `combined` runs
the rule's `measure` on each weight, adds up the results in one fixed order, and passes the sums to the rule's
`combine`. `apply` appends the result to h.

Names in the generated text::

    p, p0, p1, ...      address of the weights (in a row: of the row), and of each slot of a dense array
    w, g                a weight and its gradient
    u0, t0, ...         slot 0 before and after the update; u0 only of a slot that the unit shares
    a0, s0, ...         one weight's term of sum 0, and the sum
    h                   the numbers of the batch, float32: the rule's `scalars`, then l2, then l1
    lanes               address of scratch memory for the sums (`scratch_for`)
    turn                number of the slot whose turn it is (`Rule.turns`)

rule_twin.py computes the same in NumPy, and cuda_text.py generates the same for a GPU. All three give
bit-identical results (except math.pow on a GPU), so change the order of operations in all three or in none.
"""

import inspect
from collections.abc import Callable
from itertools import groupby
from textwrap import indent

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.rules.rule import Rule, functions_of
from psfleet.core.engine.schema.table import DecaySpec

# Sums over a unit have one fixed order, so that their bits do not depend on the machine's vector width:
#
#   chunk 0: value i is added to lane i % LANES, in float32        lane   0  1  2  3 ... 63
#                                                                  value  0  1  2  3 ... 63
#                                                                        64 65 66 67 ... 127, and so on
#            then lanes are added in halves: 0 += 32, 1 += 33, ...; 0 += 16, ...; until lane 0 has the sum
#   total:   lane 0 of chunk 0, of chunk 1, ... added in this order, in float64
#
# 64 lanes of two sums fit the registers of AVX-512. With 256 lanes, which did not fit into registers,
# row-wise Adagrad took 3.5 times as long for rows of 64 (decision 1).
#
# Chunks limit the error of float32: a lane adds up at most 64 values, however long the array is. No other
# size of a chunk has been compared, and another one would change the bits of every rule with sums.
CHUNK = 4096
LANES = 64

# These names are for the whole module: for the text generated here, and for dense.txt, push.txt and rest*.txt
# behind it. rows_head.txt imports what only kernels of rows use.
_HEAD = """\
import math

import numpy as np
from numba import float32, float64, int64, uint64, void

from psfleet.core.engine.kernels.intrinsics import (fold, helper, inlined, kernel, load_f32, load_i64,
                                        load_lane, load_u64, prefetch, prefetch_write, read_f32,
                                        read_i64, store_f32, store_i64, store_lane, store_u64)

ZERO = np.float32(0)
"""
# ZERO, and np.float32 around other numbers, because a plain 0.0 is a float64 in numba and would widen the
# arithmetic around it.


def scalars_of(
    rule: Rule, decay: DecaySpec, learning_rate: float, step: int, resting: bool = False
) -> NDArray[np.float32]:
    """Compute the numbers h of one batch, float32: those of the rule (such as its rate), then l2 and l1.

    Args:
        rule: Rule of the table.
        decay: Regularization of the table. An l2 or l1 of 0 is left out.
        learning_rate: Learning rate of this push, already scaled for the parameter.
        step: Number of updates that the table has had, including this one; the first update is 1.
        resting: True for the rows that the batch does not name, in a table that updates every row.
    """
    make = rule.resting_scalars if resting else rule.scalars
    return np.array(with_decay(make(learning_rate, step), decay), np.float32)


def with_decay(numbers: tuple[float, ...], decay: DecaySpec) -> tuple[float, ...]:
    """Append l2 and then l1 to a rule's numbers of a batch. A regularization of 0 is left out."""
    if decay.l2:
        numbers = *numbers, decay.l2
    if decay.l1:
        numbers = *numbers, decay.l1
    return numbers


class RuleSource:
    """Generator of the kernel text of one rule, for a dense array or for rows.

    Attributes:
        pointers: Names of the arguments of `apply` for the weights and the state. In dense kernels "p", "p0",
            ..., the addresses of the weights and of each slot. In sparse kernels "p", "turn", the address of
            the row and the number of the slot whose turn it is.
    """

    def __init__(self, rule: Rule, l1: bool, l2: bool, dim: int = 0, width: int = 0) -> None:
        """Prepare the text of these kernels.

        Args:
            rule: Rule whose functions are inlined.
            l1, l2: True if this regularization is added to the gradient.
            dim: Number of weights of a row of the sparse table, or 0 for dense arrays.
            width: Number of weights of a unit of a dense array as a constant for the compiler, or 0 if each
                call passes it as n.
        """
        self._rule, self._l1, self._l2, self._dim = rule, l1, l2, dim
        self._constant = dim or width
        self._count = str(self._constant or "n")
        self._numbers = len(rule.scalars(0.1, 1))  # with any arguments: only the count matters
        self._function = rule.scalar().__name__
        # A push uses only one of the slots that take turns, so `apply` has a single slot for this group.
        slots = rule.slots[: len(rule.slots) - max(rule.turns - 1, 0)]
        self._per_unit = [slot.per_unit for slot in slots]
        self._advances = rule.advance() is not None
        self.pointers = ["p", "turn"] if dim else ["p", *(f"p{i}" for i in range(len(slots)))]

    def load_scalars(self) -> str:
        """Return an expression that reads h, the tuple of the batch's numbers, from the address `scalars`."""
        count = self._numbers + self._l1 + self._l2
        return "(" + "".join(f"load_f32(scalars, {i}), " for i in range(count)) + ")"

    def unit_pointers(self) -> list[str]:
        """Return expressions for the addresses of a unit's weights and slots in dense arrays.

        dense.txt sets the names in the expressions: `unit`, the unit's number, and `at`, the offset of its
        weights in bytes. A slot with one value for each unit has 4 bytes for each unit.
        """
        steps = ["unit * 4" if single else "at" for single in self._per_unit]
        return [
            f"{name} + {step}" for name, step in zip(self.pointers, ["at", *steps], strict=True)
        ]

    def _place(self, slot: int, index: str) -> str:
        """Return the address and index of a slot's value, the arguments of `load_f32` and `store_f32`.

        In a row the weights come first and then each slot in turn. All values of a row are offsets from the
        one address p, so the compiler sees that they do not overlap. Each slot of a dense table is an array
        with an address of its own.

        Args:
            slot: Number of the slot.
            index: Expression for the weight's number in the unit; "0" for a slot that the unit shares.
        """
        if not self._dim:
            return f"p{slot}, {index}"
        offset = self._dim + sum(1 if single else self._dim for single in self._per_unit[:slot])
        # The slots that take turns are the last ones of a rule (`Rule.turns`).
        if self._rule.turns and slot == len(self._per_unit) - 1:
            return f"p, {offset} + turn * {self._dim} + {index}"
        return f"p, {offset} + {index}"

    def fill_slots(self) -> str:
        """Return statements that write the initial state of a new row."""
        lines, offset = [], self._dim
        for initial, run in groupby(self._rule.slots, lambda slot: slot.initial):
            width = sum(1 if slot.per_unit else self._dim for slot in run)
            lines.append(
                f"for k in range({width}):\n"
                f"    store_f32(row, {offset} + k, np.float32({initial!r}))"
            )
            offset += width
        return indent("\n".join(lines), " " * 8)

    def core(self) -> str:
        """Return the first part of the module: imports, the rule's functions as written, and `apply`."""
        # As text, because compiled code is cached on disk by the text of its module (cache.py): a change of a
        # rule's function changes the key. `check_functions` refuses a function that uses names of its module.
        rule, parts = self._rule, [_HEAD]
        parts += ["\n@inlined\n" + inspect.getsource(f) for f in functions_of(rule)]
        if rule.measure() is not None:
            parts.append(self._combined())
        parts.append(self._apply())
        return "\n".join(parts)

    def _decay_factors(self) -> str:
        names = ["l2"] * self._l2 + ["l1"] * self._l1
        return "".join(f"    {name} = h[{self._numbers + i}]\n" for i, name in enumerate(names))

    def _load(self, index: str) -> str:
        """Return statements that load w and g, and add l2 * w and l1 * sign(w) to g."""
        # The sign is 0 for a weight of 0, as np.sign in rule_twin.py says, and is chosen without a call that
        # could return float64.
        text = f"w = load_f32(p, {index})\ng = read_f32(gradient, {index})"
        if self._l2:
            text += "\ng = g + l2 * w"
        if self._l1:
            text += "\ng = g + (l1 if w > ZERO else (-l1 if w < ZERO else ZERO))"
        return text

    def _slots(self, index: str) -> list[str]:
        return [
            f"u{i}" if single else f"load_f32({self._place(i, index)})"
            for i, single in enumerate(self._per_unit)
        ]

    def _arguments(self, index: str) -> str:
        return ", ".join(["w", "g", *self._slots(index), "h"])

    def _load_single(self) -> str:
        """Return statements that load the slots that the unit shares, before the loop over its weights.

        The update of each weight reads the old value u and writes the new value t. All weights of a unit
        compute the same t, so storing the last one behind the loop is enough. For a unit without weights, t
        is u.
        """
        return "".join(
            f"    u{i} = t{i} = load_f32({self._place(i, '0')})\n"
            for i, single in enumerate(self._per_unit)
            if single
        )

    def _store_slots(self) -> str:
        return "".join(
            f"store_f32({self._place(i, 'i')}, t{i})\n"
            for i, single in enumerate(self._per_unit)
            if not single
        )

    def _results(self) -> str:
        return "".join(f"t{i}, " for i in range(len(self._per_unit)))

    def _directed(self, slots: list[str]) -> str:
        """Return the statement that computes the direction of a step, for rules that scale it by a norm.

        For a rule such as Lamb it is "g, = lamb_direction(w, moment1, moment2, h)".
        """
        direction = self._rule.direction()
        assert direction is not None
        return f"g, = {direction.__name__}({', '.join(['w', *slots, 'h'])})\n"

    def _apply(self) -> str:
        """Return the text of `apply`; the head of this module shows one."""
        count, pointers = self._count, ", ".join(self.pointers)
        text = f"\n@helper\ndef apply(n, gradient, lanes, {pointers}, h):\n"
        text += self._load_single() + self._decay_factors()
        if self._rule.measure() is not None:
            # The rule's functions expect the results of `combine` right behind the rule's own numbers. So l2
            # and l1, which come after these in h, are cut off. `_decay_factors` has put them into variables.
            text += f"    h = h[:{self._numbers}] + combined(n, gradient, lanes, {pointers}, h)\n"
        text += f"    for i in range({count}):\n"
        if self._advances:
            # `combined` has already updated and stored the slots, none of which the unit shares
            # (`check_functions`). It needed the direction g for its sums but did not keep it for each weight,
            # so g is computed again from the updated slots.
            body = "w = load_f32(p, i)\n" + self._directed(self._slots("i"))
            body += f"w, = {self._function}(w, g, h)\nstore_f32(p, i, w)\n"
            return text + indent(body, " " * 8)
        text += indent(self._load("i"), " " * 8)
        text += f"\n        w, {self._results()}= {self._function}({self._arguments('i')})\n"
        text += "        store_f32(p, i, w)\n" + indent(self._store_slots(), " " * 8)
        return text + "".join(
            f"    store_f32({self._place(i, '0')}, t{i})\n"
            for i, single in enumerate(self._per_unit)
            if single
        )

    def _advance(self) -> str:
        """Return statements that call the rule's `advance` and `direction`, or "" if the rule has neither.

        `advance` updates the slots of weight i, and `direction` computes the new g from them.
        """
        advance = self._rule.advance()
        if advance is None:
            return ""
        names = self._results()
        call = f"\n{names}= {advance.__name__}({self._arguments('i')})\n{self._store_slots()}"
        return (call + self._directed(names.rstrip(", ").split(", "))).rstrip()

    def _combined(self) -> str:
        """Return the text of `combined`, which sums over the unit and calls the rule's `combine`.

        The order of additions is drawn at CHUNK and LANES. The inner loop over LANES has a constant length,
        so that lanes stay in vector registers. The values behind the last complete group of LANES have a loop
        of their own.
        """
        measure, combine = self._rule.measure(), self._rule.combine()
        assert measure is not None
        assert combine is not None
        sums = sum_count(self._rule)
        # A short unit clears and folds only as many lanes as it has weights. The sum has the same bits: the
        # other lanes would be 0, and no lane is -0, because each starts at 0.
        count, lanes = self._count, _power(min(self._constant or LANES, LANES))
        call = f"{', '.join(f'a{i}' for i in range(sums))}, = {measure.__name__}("
        call += ("w, g, h" if self._advances else self._arguments("i")) + ")"
        adds = [
            f"store_lane(lanes, {LANES * i} + j, load_lane(lanes, {LANES * i} + j) + a{i})"
            for i in range(sums)
        ]
        term = "\n".join([self._load("i") + self._advance(), call, *adds])
        zeros = "\n".join(f"store_lane(lanes, {LANES * i} + j, ZERO)" for i in range(sums))
        totals = "\n".join(f"s{i} = float64(0)" for i in range(sums))
        finals = "\n".join(f"s{i} += float64(folded(lanes + {4 * LANES * i}))" for i in range(sums))
        result = ", ".join(f"float32(s{i})" for i in range(sums))
        return f"""
folded = fold({lanes})


@helper
def combined(n, gradient, lanes, {", ".join(self.pointers)}, h):
{self._load_single()}{self._decay_factors()}{indent(totals, "    ")}
    for chunk in range(0, {count}, {CHUNK}):
        end = min(chunk + {CHUNK}, {count})
        for j in range({lanes}):
{indent(zeros, " " * 12)}
        whole = chunk + (end - chunk) // {LANES} * {LANES}
        for start in range(chunk, whole, {LANES}):
            for j in range({LANES}):
                i = start + j
{indent(term, " " * 16)}
        for j in range(end - whole):
            i = whole + j
{indent(term, " " * 12)}
{indent(finals, " " * 8)}
    return {combine.__name__}({result}, float32({count}), h)
"""


def _power(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def scratch_for(rule: Rule, width: int = 0) -> NDArray[np.float32]:
    """Allocate scratch memory of a kernel, float32: LANES for each of the rule's sums, then `width`.

    Args:
        rule: Rule of the kernel.
        width: Number of values of a packed row as float32, or 0 for plain rows and dense arrays.
    """
    return np.empty(LANES * sum_count(rule) + width, np.float32)


def sum_count(rule: Rule) -> int:
    """Return the number of sums over several weights that the rule needs, such as 2 for two norms."""
    measure = rule.measure()
    if measure is None:
        return 0
    slots = 0 if rule.advance() else len(rule.slots) - max(rule.turns - 1, 0)
    return result_count(measure, 3 + slots)


def result_count(function: Callable[..., tuple[float, ...]], arguments: int) -> int:
    """Return the number of results of a rule's function, found by calling it with ones.

    Args:
        function: Function of the rule.
        arguments: Number of its arguments, including h.
    """
    # Ones, since rules divide by some of their arguments. h is longer than any rule's: psfleet's own have at
    # most 17 numbers.
    return len(function(*[1.0] * (arguments - 1), [1.0] * 64))
