"""Where to cut for recompute: the least time within a memory budget.

The operations of the forward pass are measured once. Over the positions between them a dynamic
program then chooses segments and which of them to drop. With m(i, j) what segment [i, j) saves, x(j)
what crosses position j, t(i, j) its time, B the budget, and r(j) the memory held for the part before
j when the backward pass has come down to j:

    dropped: r(j) = r(i) + x(j), allowed if r(i) + m(i, j) <= B, costs t(i, j)
    kept:    r(j) = r(i) + m(i, j) <= B, costs nothing

Memory is counted in steps of B / 256, rounded up, so that a choice never exceeds the budget.
"""

import copy
import dataclasses
import math
import time
import weakref
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import UsageError
from psfleet.program.operation import Context
from psfleet.program.run import ProgramRun
from psfleet.program.variable import compute

__all__ = ["ForwardCosts", "choose_cuts", "even_cuts", "owner_of", "peak_of", "profile"]

LEVELS = 256
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ForwardCosts:
    """What the forward pass costs, operation by operation.

    Attributes:
        saved: int64 [n]: bytes that each keeps for its backward.
        crossing: int64 [n + 1]: bytes of computed values that are needed on both sides of a position.
        seconds: float64 [n].
    """

    saved: Ints
    crossing: Ints
    seconds: NDArray[np.float64]


def profile(run: ProgramRun) -> ForwardCosts:
    """Measure the plan's forward records on the run's own values, keeping nothing."""
    records = run.plan.forward
    before = dict(run.values)
    # What a metric accumulates from one run to the next must not count this one.
    program = dataclasses.replace(run.program, memory=copy.deepcopy(run.program.memory))
    uses = {v: i for i, record in enumerate(records) for v in record.inputs}
    kept = run.plan.kept
    saved = np.zeros(len(records), np.int64)
    crossing = np.zeros(len(records) + 1, np.int64)
    seconds = np.zeros(len(records))
    seen: dict[int, Any] = {}
    for value in before.values():
        _new_bytes(value, seen)
    for i, record in enumerate(records):
        needs = run.plan.needs.get(record, ())
        context = Context(program, record, needs or (False,) * len(record.inputs))
        inputs = [run.input(variable) for variable in record.needed(any(needs))]
        start = time.perf_counter()
        value = compute(record.op, context, inputs, record.output.dtype)
        seconds[i] = time.perf_counter() - start
        run.values[record.output] = value
        saved[i] = sum(_new_bytes(part, seen) for part in context.saved)
        last = uses.get(record.output, i)
        if record.output not in kept:
            crossing[i + 1 : last + 1] += value.nbytes
        for variable in run.plan.releases.get(record, ()):
            run.values.pop(variable, None)
    run.values = before
    return ForwardCosts(saved, crossing, seconds)


def _new_bytes(part: Any, seen: dict[int, Any]) -> int:
    """Bytes of an array, unless one that shares its memory was seen and still lives."""
    if not isinstance(part, np.ndarray):
        return 0
    owner = owner_of(part)
    known = seen.get(id(owner))
    if known is not None and known() is owner:
        return 0
    seen[id(owner)] = weakref.ref(owner)
    return int(owner.nbytes)


def owner_of(value: Any) -> Any:
    """The array that owns the memory that another shows."""
    while isinstance(value.base, np.ndarray):
        value = value.base
    return value


def even_cuts(count: int) -> tuple[list[int], list[bool]]:
    """The floor to beat: about sqrt(n) segments of equal length, all but the last dropped."""
    parts = max(1, math.isqrt(count))
    edges = sorted({round(i * count / parts) for i in range(parts + 1)})
    return edges, [True] * (len(edges) - 2) + [False]


def peak_of(costs: ForwardCosts, edges: list[int], drops: list[bool]) -> int:
    """The bytes that segments take at the worst moment, as the dynamic program counts them."""
    total = np.concatenate([[0], np.cumsum(costs.saved)])
    held = peak = 0
    for (i, j), dropped in zip(pairwise(edges), drops, strict=True):
        inside = int(total[j] - total[i])
        peak = max(peak, held + inside)
        held += int(costs.crossing[j]) if dropped else inside
    return max(peak, held)


def choose_cuts(costs: ForwardCosts, budget: int | None) -> tuple[list[int], list[bool]]:
    """The cuts of least time within the budget.

    Args:
        costs: Of the forward pass.
        budget: Bytes; None: what `even_cuts` need.

    Returns:
        Edges (0 to n) and, for each segment, whether it is dropped.

    Raises:
        UsageError: No choice keeps within the budget.
    """
    limit = peak_of(costs, *even_cuts(len(costs.saved))) if budget is None else budget
    found = _search(costs, max(limit, 1))
    if found is None:
        raise UsageError(
            f"activations do not fit into the memory budget of {limit:,} bytes however "
            "they are recomputed; allow more or use smaller batches"
        )
    return found


def _search(costs: ForwardCosts, budget: int) -> tuple[list[int], list[bool]] | None:
    """best[j, r]: the least time for the part before j that holds at most r units then."""
    count = len(costs.saved)
    unit = budget / LEVELS
    total = np.concatenate([[0], np.cumsum(costs.saved)])
    clock = np.concatenate([[0.0], np.cumsum(costs.seconds)])
    crossing = np.ceil(costs.crossing / unit).astype(np.int64)
    best = np.full((count + 1, LEVELS + 1), np.inf)
    came = np.full((count + 1, LEVELS + 1, 3), -1, np.int64)
    best[0] = 0.0
    for j in range(1, count + 1):
        for i in reversed(range(j)):
            inside = math.ceil((total[j] - total[i]) / unit)
            if inside > LEVELS:
                break  # and so are all that begin earlier
            held = np.arange(LEVELS + 1 - inside)  # r(i) that leaves room for the segment
            _offer(best, came, j, i, held, held + inside, best[i, held], False)
            after = held + crossing[j]
            fits = after <= LEVELS
            _offer(
                best,
                came,
                j,
                i,
                held[fits],
                after[fits],
                best[i, held[fits]] + clock[j] - clock[i],
                True,
            )
    at = int(np.argmin(best[count]))
    return None if np.isinf(best[count, at]) else _walk_back(came, count, at)


def _offer(
    best: NDArray[np.float64],
    came: Ints,
    j: int,
    i: int,
    held: Ints,
    after: Ints,
    seconds: NDArray[np.float64],
    dropped: bool,
) -> None:
    better = seconds < best[j, after]
    where = after[better]
    best[j, where] = seconds[better]
    came[j, where, 0], came[j, where, 1], came[j, where, 2] = i, held[better], dropped


def _walk_back(came: Ints, j: int, held: int) -> tuple[list[int], list[bool]]:
    edges, drops = [j], []
    while j > 0:
        i, before, dropped = came[j, held]
        edges.append(int(i))
        drops.append(bool(dropped))
        j, held = int(i), int(before)
    return edges[::-1], drops[::-1]
