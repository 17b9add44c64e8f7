"""Choice of a parameter's kind of table, and bindings for parameters without a table of their own.

A sparse gradient must have the same effect as the dense gradient that it stands for, zeros included. Under
SGD rows without a gradient do not change, so a sparse table can leave them alone. Under momentum they drift
on, and under weight decay they shrink: then a sparse table must visit more rows, or the parameter needs a
dense table. `placement_of` decides it, by trying the rule on a zero gradient (`reach`).

`LazyBinding` stands in until the first use makes the table; `AveragedBinding` shows an average of the
weights.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.interface import Asked, PooledIds
from psfleet.core.engine.rules.rule import Rule
from psfleet.core.engine.schema.table import MAX_DIM, DecaySpec, key_of
from psfleet.core.graph.parameters.parameter import Parameter, check_rows, fetch
from psfleet.core.runtime.process_runtime import active

Reach = Literal["touched", "stored", "all"]
"""Rows that an update must visit so that a sparse gradient has the effect of the dense one: those with a
gradient, every row that ever had one, or simply all.
"""


Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Placement:
    """Kind of a parameter's table.

    Attributes:
        kind: As in TableSpec. A sparse table needs gradients by rows.
        every_row: True if an update visits all rows of the table, as in TableSpec.
    """

    kind: Literal["dense", "sparse"]
    every_row: bool = False


def has_any_id(parameter: Parameter) -> bool:
    """Return whether a parameter has rows for any 64-bit id, instead of a known number of rows."""
    return parameter.sparse and (parameter.distributed or parameter.shape[0] < 0)


def placement_of(
    parameter: Parameter, rule: Rule, decay: DecaySpec, lazy: bool, every_row: bool = False
) -> Placement:
    """Choose the table that gives a parameter the reference's semantics.

    A parameter with rows for any id gets a sparse table, whose updates visit only rows with a gradient. Any
    other parameter behaves as if its gradients were dense, so that rows without a gradient still decay and
    drift, unless the optimizer is lazy. Its table is sparse if the rule leaves such rows as they are.

    Args:
        parameter: Parameter to place.
        rule: Rule of its optimizer.
        decay: Weight decay of the optimizer. Any decay changes all rows.
        lazy: True if the optimizer leaves rows without a gradient alone.
        every_row: True if updates visit all existing rows of a parameter with rows for any id.
    """
    if has_any_id(parameter):
        return Placement("sparse", every_row)
    if not parameter.sparse or len(parameter.shape) != 2:
        return Placement("dense")
    if not 1 <= parameter.shape[1] <= MAX_DIM or decay != DecaySpec():
        return Placement("dense")
    extent = "touched" if lazy else reach(rule)
    return Placement("dense") if extent == "all" else Placement("sparse", extent == "stored")


@lru_cache(maxsize=256)
def reach(rule: Rule) -> Reach:
    """Return which rows an update under this rule must visit, found by trying a zero gradient.

    If it moves a fresh row, an update must visit all rows. If it moves a row that has had gradients (its
    slots are no longer at their first values), it must visit those rows. A rule that cannot be tried counts
    as "all".
    """
    if rule.unit == "parameter":
        return "all"
    scalar = rule.scalar()
    fresh = (0.75, *(slot.initial for slot in rule.slots))
    try:
        if _moves(rule, scalar, fresh, 1):
            return "all"
        moves = [_moves(rule, scalar, values, step) for step, values in _used(rule, scalar, fresh)]
        return "stored" if any(moves) else "touched"
    except (ArithmeticError, ValueError, TypeError):
        return "all"


def _used(
    rule: Rule, scalar: Callable[..., tuple[float, ...]], values: tuple[float, ...]
) -> Iterator[tuple[int, tuple[float, ...]]]:
    """Yield the values of a weight and its slots after some updates, each with the number of the next
    step."""
    for step, gradient in enumerate((0.5, -0.25, 1.5), 1):
        w, *slots = values
        values = scalar(w, gradient, *slots, _numbers(rule, w, gradient, slots, step))
        yield step + 1, values


def _numbers(
    rule: Rule, w: float, gradient: float, slots: Sequence[float], step: int
) -> tuple[float, ...]:
    """Return the numbers that a rule's scalar function gets for a whole batch, for a unit of one weight.

    Rules that measure a unit (such as the norm of a row) get the combined measure too.
    """
    h, measure, combine = rule.scalars(0.1, step), rule.measure(), rule.combine()
    if measure is None or combine is None:
        return h
    return (*h, *combine(*measure(w, gradient, *slots, h), 1.0, h))


def _moves(
    rule: Rule, scalar: Callable[..., tuple[float, ...]], values: tuple[float, ...], step: int
) -> bool:
    """Return whether a zero gradient changes the weight or a slot."""
    w, *slots = values
    after = scalar(w, 0.0, *slots, _numbers(rule, w, 0.0, slots, step))
    return not all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(values, after, strict=True))


class LazyBinding:
    """Binding that makes a parameter's table when the value is first needed.

    So a run starts from the value in the fleet, and not from the value with which this process would start
    it. Implements psfleet.core.graph.parameters.parameter.Binding.

    Args:
        bind: Function that makes the table of a parameter and binds the parameter to it.
        early: True to make the table at the first read even in an embedded runtime without such a table.
            There the parameter's own value is as good until an optimizer updates it.
    """

    def __init__(self, bind: Callable[[Parameter], Any], early: bool) -> None:
        self._bind = bind
        self._early = early

    def value(self, parameter: Parameter) -> Floats:
        """Return the whole current value."""
        with self._settled([parameter]):
            return parameter.numpy()

    def lookup(self, parameter: Parameter, ids: Ids) -> Floats:
        """Return current rows of a sparse parameter."""
        with self._settled([parameter]):
            return parameter.lookup(ids)

    def pooled(self, parameter: Parameter, lookup: PooledIds) -> tuple[PooledIds, Floats]:
        """Pool the rows."""
        with self._settled([parameter]):
            return parameter.pooled(lookup)

    def prefetch(
        self, dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Asked]]
    ) -> None:
        """Make the tables, and pull everything that a step needs."""
        with self._settled([*dense, *(p for p, _ in sparse)]):
            fetch(dense, sparse)

    @contextlib.contextmanager
    def _settled(self, parameters: Sequence[Parameter]) -> Iterator[None]:
        """Make the tables that are needed now, and let the block read the parameters without this binding."""
        runtime, parameters = active(), list({id(p): p for p in parameters}.values())
        # Without a binding a parameter gives its own value: `bind` fills the new table with it, and a
        # parameter that gets no table yet answers the block's read. That one gets this binding back below.
        for parameter in parameters:
            parameter.binding = None
            if self._early or runtime.server_num or key_of(parameter.name) in runtime.specs():
                self._bind(parameter)
        yield
        for parameter in parameters:
            parameter.binding = parameter.binding or self


class AveragedBinding:
    """Binding that shows an average in place of a parameter's value, until the optimizer restores it.

    Meanwhile a run of the training program only evaluates. Implements
    psfleet.core.graph.parameters.parameter.Binding.

    Args:
        average: Average to show, float32 in the parameter's shape. It becomes read-only.
    """

    read_only = True

    def __init__(self, average: Floats) -> None:
        self._average = average
        average.flags.writeable = False

    def value(self, parameter: Parameter) -> Floats:
        """Return the average."""
        return self._average

    def lookup(self, parameter: Parameter, ids: Ids) -> Floats:
        """Return rows of the average."""
        check_rows(parameter, ids)
        rows: Floats = self._average[ids]
        return rows

    def prefetch(
        self, dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Asked]]
    ) -> None:
        """Do nothing, because the average is in memory."""
