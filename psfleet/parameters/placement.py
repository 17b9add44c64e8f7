"""Which kind of table a parameter gets: dense, sparse, or sparse with every row updated."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from psfleet.parameters.parameter import Parameter
from psfleet.rules.rule import Rule
from psfleet.schema.table import MAX_DIM, DecaySpec

__all__ = ["Placement", "Reach", "has_any_id", "place", "reach"]

Reach = Literal["touched", "stored", "all"]
"""Which rows an update must visit so that a sparse gradient has the effect of the dense one: those
with a gradient, every row that ever had one, or simply all."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Attributes as in TableSpec; `kind` sparse needs a gradient by rows."""

    kind: Literal["dense", "sparse"]
    every_row: bool = False


def has_any_id(parameter: Parameter) -> bool:
    """Whether it has rows for any id, and not an array of them."""
    return parameter.sparse and (parameter.distributed or parameter.shape[0] < 0)


def place(
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
    wanted = "touched" if lazy else reach(rule)
    return Placement("dense") if wanted == "all" else Placement("sparse", wanted == "stored")


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
        moves = [_moves(rule, scalar, used, step) for step, used in _used(rule, scalar, fresh)]
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
