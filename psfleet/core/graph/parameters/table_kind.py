"""Chooses between a dense and a sparse table for a parameter. Also has bindings that replace a table.

A sparse gradient must have the same effect as the dense gradient with zeros in all other rows. Under SGD,
rows without a gradient do not change, so a sparse table can skip them. Under momentum such rows keep
moving, and under weight decay they shrink: then an update of a sparse table must visit more rows, or the
parameter needs a dense table. `placement_of` decides this by applying the rule to a zero gradient
(`reach`).

`LazyBinding` is used until the first use of a parameter makes its table. `AveragedBinding` shows an average
of the weights in place of the weights.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.rules.rule import Rule
from psfleet.core.engine.runtime_interface import Asked, PooledIds
from psfleet.core.engine.schema.table import MAX_DIM, DecaySpec, key_of
from psfleet.core.graph.parameters.parameter import Parameter, check_rows, fetch
from psfleet.core.runtime.process_runtime import active

Reach = Literal["touched", "stored", "all"]
"""Rows that an update must visit so that a sparse gradient has the effect of the dense one: only rows with a
gradient ("touched"), every row that ever had a gradient ("stored"), or all rows.
"""


Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Placement:
    """Kind of table that a parameter gets.

    Attributes:
        kind: Kind of the table. A sparse table needs gradients by rows.
        every_row: True if an update visits all rows that exist, not only those with a gradient.
    """

    kind: Literal["dense", "sparse"]
    every_row: bool = False


def has_any_id(parameter: Parameter) -> bool:
    """Return whether a parameter has rows for any 64-bit id, instead of a fixed number of rows."""
    return parameter.sparse and (parameter.distributed or parameter.shape[0] < 0)


def placement_of(
    parameter: Parameter, rule: Rule, decay: DecaySpec, lazy: bool, every_row: bool = False
) -> Placement:
    """Choose the table for which a parameter behaves as in the reference framework.

    A parameter with rows for any id gets a sparse table, whose updates visit only rows with a gradient. Any
    other parameter must behave as if its gradients were dense: rows without a gradient still decay and keep
    moving, unless the optimizer is lazy. It gets a sparse table only if the rule leaves such rows unchanged.

    Args:
        decay: Weight decay of the optimizer. Any decay changes all rows.
        lazy: True if the optimizer leaves rows without a gradient unchanged.
        every_row: True if updates must visit all existing rows of a parameter with rows for any id.
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
    """Return the rows that an update under this rule must visit, found by applying a zero gradient.

    - "all" if a zero gradient changes a row that has had no gradient yet, or if the rule raises an error.
    - "stored" if it changes only rows that have had gradients, whose slots (optimizer state) therefore no
      longer have their initial values.
    - "touched" if it changes nothing. An update then visits only rows with a gradient.
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
    """Apply three gradients to a weight, for `reach`.

    Yields after each update the number of the next step, and the weight with its slots (optimizer state).
    """
    for step, gradient in enumerate((0.5, -0.25, 1.5), 1):
        w, *slots = values
        values = scalar(w, gradient, *slots, _numbers(rule, w, gradient, slots, step))
        yield step + 1, values


def _numbers(
    rule: Rule, w: float, gradient: float, slots: Sequence[float], step: int
) -> tuple[float, ...]:
    """Return the last argument of a rule's scalar function, the numbers that are the same for a whole batch.

    Some rules also measure a unit of several weights, such as the norm of a row. For these rules the
    numbers include the measure of a unit that has only this weight.
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
    """Binding that makes a parameter's table when its value is first needed.

    So a run starts from the value that the fleet has, not from the initial value in this process. Implements
    psfleet.core.graph.parameters.parameter.Binding.

    Args:
        bind: Makes the table of a parameter, and binds the parameter to it.
        early: True to make the table at the first read in every case. False to make no new table in an
            embedded runtime: there the parameter's own value is right until an optimizer updates it.
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
        """Return pooled rows, as `Parameter.pooled` does."""
        with self._settled([parameter]):
            return parameter.pooled(lookup)

    def prefetch(
        self, dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Asked]]
    ) -> None:
        """Make the tables, and pull all values that a step needs."""
        with self._settled([*dense, *(p for p, _ in sparse)]):
            fetch(dense, sparse)

    @contextlib.contextmanager
    def _settled(self, parameters: Sequence[Parameter]) -> Iterator[None]:
        """Make the tables of these parameters, and let the block read the parameters without this binding."""
        runtime, parameters = active(), list({id(p): p for p in parameters}.values())
        # Without a binding, a parameter returns its own value. `bind` fills the new table with that value.
        # A parameter that gets no table yet also returns its own value in the block, and gets this binding
        # back below.
        try:
            for parameter in parameters:
                parameter.binding = None
                if self._early or runtime.server_num or key_of(parameter.name) in runtime.specs():
                    self._bind(parameter)
            yield
        finally:
            for parameter in parameters:
                parameter.binding = parameter.binding or self


class AveragedBinding:
    """Binding that shows an average in place of a parameter's value, until the optimizer restores the value.

    While it is in use, a run of the training program updates nothing. Implements
    psfleet.core.graph.parameters.parameter.Binding.

    Args:
        average: Average to show, float32 in the parameter's shape. The array becomes read-only.
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
