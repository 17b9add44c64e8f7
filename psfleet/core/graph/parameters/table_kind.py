"""Choice of the kind of table for a parameter, and placeholders for a table that is not made yet."""

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
    """Attributes as in TableSpec; `kind` sparse needs a gradient by rows."""

    kind: Literal["dense", "sparse"]
    every_row: bool = False


def has_any_id(parameter: Parameter) -> bool:
    """Return whether it has rows for any id, and not an array of them."""
    return parameter.sparse and (parameter.distributed or parameter.shape[0] < 0)


def placement_of(
    parameter: Parameter, rule: Rule, decay: DecaySpec, lazy: bool, every_row: bool = False
) -> Placement:
    """The table that gives a parameter the reference's semantics.

    Of a distributed parameter, which has rows for any id, only rows with a gradient are visited. Any
    other is treated as if its gradients were dense, unless the optimizer is lazy: rows without
    gradient still decay and drift. Where the rule says that they do not, they are left alone.

    Args:
        lazy: The optimizer wants rows without a gradient to rest.
        every_row: It wants every row of a distributed parameter visited that there is.
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
    """Found by trying: what a zero gradient does to a fresh row and to a used one."""
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
    """Values after some updates, each with the number of the step that would follow."""
    for step, gradient in enumerate((0.5, -0.25, 1.5), 1):
        w, *slots = values
        values = scalar(w, gradient, *slots, _numbers(rule, w, gradient, slots, step))
        yield step + 1, values


def _numbers(
    rule: Rule, w: float, gradient: float, slots: Sequence[float], step: int
) -> tuple[float, ...]:
    """The numbers of a batch, for a unit of one weight."""
    h, measure, combine = rule.scalars(0.1, step), rule.measure(), rule.combine()
    if measure is None or combine is None:
        return h
    return (*h, *combine(*measure(w, gradient, *slots, h), 1.0, h))


def _moves(
    rule: Rule, scalar: Callable[..., tuple[float, ...]], values: tuple[float, ...], step: int
) -> bool:
    w, *slots = values
    after = scalar(w, 0.0, *slots, _numbers(rule, w, 0.0, slots, step))
    return not all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(values, after, strict=True))


class LazyBinding:
    """Stands in for a parameter's table until the value is needed; then the table is made.

    So a run starts from the value that the fleet has, not from the one that this process would start
    with. Implements psfleet.core.graph.parameters.parameter.Binding.

    Args:
        take: Makes the table of a parameter.
        early: Make it even if the runtime is embedded and has no such table yet.
    """

    def __init__(self, bind: Callable[[Parameter], Any], early: bool) -> None:
        self._bind = bind
        self._early = early

    def value(self, parameter: Parameter) -> Floats:
        """The whole current value."""
        with self._settled([parameter]):
            return parameter.numpy()

    def lookup(self, parameter: Parameter, ids: Ids) -> Floats:
        """Current rows of a sparse parameter."""
        with self._settled([parameter]):
            return parameter.lookup(ids)

    def pooled(self, parameter: Parameter, lookup: PooledIds) -> tuple[PooledIds, Floats]:
        """Pool the rows."""
        with self._settled([parameter]):
            return parameter.pooled(lookup)

    def prefetch(
        self, dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Asked]]
    ) -> None:
        """Make the tables and bring what the step needs."""
        with self._settled([*dense, *(p for p, _ in sparse)]):
            fetch(dense, sparse)

    @contextlib.contextmanager
    def _settled(self, parameters: Sequence[Parameter]) -> Iterator[None]:
        runtime, parameters = active(), list({id(p): p for p in parameters}.values())
        for parameter in parameters:
            parameter.binding = None
            if self._early or runtime.server_num or key_of(parameter.name) in runtime.specs():
                self._bind(parameter)
        yield
        for parameter in parameters:
            parameter.binding = parameter.binding or self


class AveragedBinding:
    """Shows an average in place of a parameter's value. Implements
    psfleet.core.graph.parameters.parameter.Binding.

    While it does, a run of the training program only evaluates.
    """

    read_only = True

    def __init__(self, average: Floats) -> None:
        self._average = average
        average.flags.writeable = False

    def value(self, parameter: Parameter) -> Floats:
        """The average."""
        return self._average

    def lookup(self, parameter: Parameter, ids: Ids) -> Floats:
        """Rows of the average."""
        check_rows(parameter, ids)
        rows: Floats = self._average[ids]
        return rows

    def prefetch(
        self, dense: Sequence[Parameter], sparse: Sequence[tuple[Parameter, Asked]]
    ) -> None:
        """Nothing: it is all here."""
