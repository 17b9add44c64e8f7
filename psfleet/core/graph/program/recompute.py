"""Recompute: drops activations between checkpoints and computes them again in the backward pass.

The forward records are cut into segments. A dropped segment saves nothing in the forward pass, except the
values that later segments read. The backward pass computes the segment again, with the same operations on the
same values, and then goes back through it. So gradients are bit-identical, including dropout masks.

With `Automatic` checkpoints, the operations of the forward pass are measured once. A dynamic program then
chooses the segments, and which segments to drop. A segment [i, j) has the operations from position i to
before j. Let m(i, j) be the bytes that it saves, x(j) the bytes that cross position j, t(i, j) its time, B
the budget, and r(j) the memory in use for operations before j when the backward pass has come down to j:

    dropped: r(j) = r(i) + x(j), allowed if r(i) + m(i, j) <= B, costs t(i, j)
    kept:    r(j) = r(i) + m(i, j) <= B, costs nothing

Memory is counted in steps of B / 256, rounded up, so that a choice never exceeds the budget.

`RecomputingRun` replaces `ProgramRun` for a program with checkpoints (`append_backward(checkpoints=)` or
RecomputeOptimizer). The segments are chosen in its first run and stored in the plan, so only that run
measures.
"""

import copy
import dataclasses
import math
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.graph.program.backward import Automatic, Backward
from psfleet.core.graph.program.operation import Context, Record, ancestors
from psfleet.core.graph.program.run import BackwardPlan, ExecutionPlan, ProgramRun, last_uses
from psfleet.core.graph.program.variable import Variable, compute

LEVELS = 256
"""Number of steps that a memory budget is divided into."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ForwardCosts:
    """Measured costs of each operation of a forward pass.

    Attributes:
        saved: Bytes that each operation keeps for its backward pass, int64 [n].
        crossing: Bytes of values computed before a position and needed after it, int64 [n + 1].
        seconds: Time of each operation, float64 [n].
    """

    saved: Ints
    crossing: Ints
    seconds: NDArray[np.float64]


def profile(run: ProgramRun) -> ForwardCosts:
    """Measure memory and time of each record (use of an operation) of the plan's forward pass.

    The records run on the run's own values, which are restored afterwards.
    """
    records = run.plan.forward
    before = dict(run.values)
    # Metrics accumulate over runs in the program's memory. Use a copy, so that no sample is counted twice.
    program = dataclasses.replace(run.program, memory=copy.deepcopy(run.program.memory))
    uses = {v: i for i, record in enumerate(records) for v in record.inputs}
    results = run.plan.kept
    saved = np.zeros(len(records), np.int64)
    crossing = np.zeros(len(records) + 1, np.int64)
    seconds = np.zeros(len(records))
    owners: dict[int, Any] = {}
    for value in before.values():
        _new_bytes(value, owners)
    for i, record in enumerate(records):
        needs = run.plan.needs.get(record, ())
        context = Context(program, record, needs or (False,) * len(record.inputs))
        inputs = [run.input(variable) for variable in record.needed(any(needs))]
        start = time.perf_counter()
        value = compute(record.op, context, inputs, record.output.dtype)
        seconds[i] = time.perf_counter() - start
        run.values[record.output] = value
        saved[i] = sum(_new_bytes(part, owners) for part in context.saved)
        last = uses.get(record.output, i)
        if record.output not in results:
            crossing[i + 1 : last + 1] += value.nbytes
        for variable in run.plan.releases.get(record, ()):
            run.values.pop(variable, None)
    run.values = before
    return ForwardCosts(saved, crossing, seconds)


def _new_bytes(part: Any, owners: dict[int, Any]) -> int:
    """Return the bytes of an array, or 0 if its memory was counted already and is still in use.

    The owner is compared too, because a new object may get the id() of a freed one.
    """
    if not isinstance(part, np.ndarray):
        return 0
    owner = owner_of(part)
    earlier = owners.get(id(owner))
    if earlier is not None and earlier() is owner:
        return 0
    owners[id(owner)] = weakref.ref(owner)
    return int(owner.nbytes)


def owner_of(value: Any) -> Any:
    """Return the array that owns the memory of `value`, which may be a view of it."""
    while isinstance(value.base, np.ndarray):
        value = value.base
    return value


def even_cuts(count: int) -> tuple[list[int], list[bool]]:
    """Return the default cuts: about sqrt(n) segments (neighboring operations) of equal length.

    All segments are dropped (computed again in the backward pass) except for the last one, which the backward
    pass needs at once.

    Returns:
        Edges of the segments (0 to n), and for each segment True if it is dropped.
    """
    parts = max(1, math.isqrt(count))
    edges = sorted({round(i * count / parts) for i in range(parts + 1)})
    return edges, [True] * (len(edges) - 2) + [False]


def peak_of(costs: ForwardCosts, edges: list[int], drops: list[bool]) -> int:
    """Return the largest memory in use at a time with these cuts, in bytes, counted as in `_search`.

    Args:
        edges: Positions at which segments begin, and the end.
        drops: For each segment, True if its activations are dropped.
    """
    total = np.concatenate([[0], np.cumsum(costs.saved)])
    live = peak = 0
    for (i, j), drop in zip(pairwise(edges), drops, strict=True):
        inside = int(total[j] - total[i])
        peak = max(peak, live + inside)
        live += int(costs.crossing[j]) if drop else inside
    return max(peak, live)


def choose_cuts(costs: ForwardCosts, budget: int | None) -> tuple[list[int], list[bool]]:
    """Choose the cuts of a forward pass into segments that cost the least recomputing time within a budget.

    A segment is a number of neighboring operations. If it is dropped, the backward pass computes it again.

    Args:
        budget: Bytes that activations may take, or None for the bytes that `even_cuts` take.

    Returns:
        Edges of the segments (0 to n), and for each segment True if it is dropped.

    Raises:
        UsageError: No choice keeps within the budget.
    """
    limit = peak_of(costs, *even_cuts(len(costs.saved))) if budget is None else budget
    cuts = _search(costs, max(limit, 1))
    if cuts is None:
        raise UsageError(
            f"activations do not fit into the memory budget of {limit:,} bytes however "
            "they are recomputed; allow more or use smaller batches"
        )
    return cuts


def _search(costs: ForwardCosts, budget: int) -> tuple[list[int], list[bool]] | None:
    """Return the cheapest edges and drops, or None if none fit, by the recurrence in the module docstring.

    best[j, r] is the least recomputing time for the operations before j, if r units of memory are in use at
    j. origins[j, r] holds the last segment of that choice: its start i, the units in use at i, and whether
    [i, j) is dropped.
    """
    count = len(costs.saved)
    unit = budget / LEVELS
    total = np.concatenate([[0], np.cumsum(costs.saved)])
    clock = np.concatenate([[0.0], np.cumsum(costs.seconds)])
    crossing = np.ceil(costs.crossing / unit).astype(np.int64)
    best = np.full((count + 1, LEVELS + 1), np.inf)
    origins = np.full((count + 1, LEVELS + 1, 3), -1, np.int64)
    best[0] = 0.0
    for j in range(1, count + 1):
        for i in reversed(range(j)):
            inside = math.ceil((total[j] - total[i]) / unit)
            if inside > LEVELS:
                break  # a segment that starts earlier saves even more
            live = np.arange(LEVELS + 1 - inside)  # each r(i) that leaves room for the segment
            _offer(best, origins, j, i, live, live + inside, best[i, live], False)
            after = live + crossing[j]
            fits = after <= LEVELS
            _offer(
                best,
                origins,
                j,
                i,
                live[fits],
                after[fits],
                best[i, live[fits]] + clock[j] - clock[i],
                True,
            )
    at = int(np.argmin(best[count]))
    return None if np.isinf(best[count, at]) else _walk_back(origins, count, at)


def _offer(
    best: NDArray[np.float64],
    origins: Ints,
    j: int,
    i: int,
    live: Ints,
    after: Ints,
    seconds: NDArray[np.float64],
    drop: bool,
) -> None:
    """Offer the segment [i, j) to the search, kept or dropped, as the last segment before j.

    The segment becomes the choice for each memory use in `after` for which it takes less time than the best
    choice so far.
    """
    better = seconds < best[j, after]
    where = after[better]
    best[j, where] = seconds[better]
    origins[j, where, 0], origins[j, where, 1], origins[j, where, 2] = i, live[better], drop


def _walk_back(origins: Ints, j: int, live: int) -> tuple[list[int], list[bool]]:
    edges, drops = [j], []
    while j > 0:
        i, before, drop = origins[j, live]
        edges.append(int(i))
        drops.append(bool(drop))
        j, live = int(i), int(before)
    return edges[::-1], drops[::-1]


@dataclass
class Segment:
    """Neighboring records that are run, dropped and computed again together.

    Attributes:
        records: Records of the forward pass, in order.
        dropped: True if the forward pass saves nothing for the backward pass.
        replay: Records to run again before the backward pass. Empty unless dropped.
        active: Records that gradients flow through.
        own: Variables computed here that replays of other segments read.
        releases: For each record of the replay, the variables whose values are not needed after it.
    """

    records: list[Record]
    dropped: bool
    replay: list[Record]
    active: list[Record]
    own: list[Variable]
    releases: dict[Record, list[Variable]]


@dataclass
class RecomputePlan:
    """Division of a forward pass into segments (neighboring records that are kept or dropped together).

    Attributes:
        segments: Segments in forward order.
        stay: Variables whose values must outlive their last use in the forward pass, because a replay of
            another segment reads them.
    """

    segments: list[Segment]
    stay: set[Variable]


class RecomputingRun(ProgramRun):
    """Run that drops the activations of some segments (neighboring operations of the forward pass).

    The backward pass computes these activations again.
    """

    def main(self) -> None:
        """Run the segments forward. A dropped segment saves nothing for its backward pass."""
        if self.plan.recompute is None:
            self.plan.recompute = make_recompute_plan(self)
        plan: RecomputePlan = self.plan.recompute
        for segment in plan.segments:
            for record in segment.records:
                needs = () if segment.dropped else self.plan.needs.get(record, ())
                self.step(record, needs)
                for variable in self.plan.releases.get(record, ()):
                    if variable not in plan.stay:
                        self.values.pop(variable, None)

    def _backward(self, plan: BackwardPlan, keep: bool) -> None:
        sweep = self.seeded(plan)
        recompute: RecomputePlan = self.plan.recompute
        for segment in reversed(recompute.segments):
            # Only later segments read these values, and their backward passes are over. Dropping the values
            # first frees memory; the replay below computes them again.
            for variable in segment.own:
                if variable not in self.plan.kept:
                    self.values.pop(variable, None)
            if segment.dropped:
                self._replay(segment)
            sweep.run(segment.active, self.contexts)
        self.take_gradients(plan, sweep)

    def _replay(self, segment: Segment) -> None:
        for record in segment.replay:
            self.step(record, self.plan.needs.get(record, ()))
            for variable in segment.releases.get(record, ()):
                self.values.pop(variable, None)


def make_recompute_plan(run: ProgramRun) -> RecomputePlan:
    """Cut the forward records into segments, at the checkpoints or where measured costs are lowest."""
    plan = run.plan
    if len(plan.backwards) != 1:
        raise UsageError(f"the program has {len(plan.backwards)} losses; recompute works with one")
    backward = plan.backwards[0]
    checkpoints = backward.backward.checkpoints
    if isinstance(checkpoints, Automatic):
        costs = profile(run)
        edges, drops = choose_cuts(costs, checkpoints.budget)
    else:
        edges = _edges(plan, backward.backward, checkpoints or [])
        drops = [True] * (len(edges) - 2) + [False]
    parts = [plan.forward[start:end] for start, end in pairwise(edges)]
    return _segmented(plan, backward, parts, drops)


def _edges(plan: ExecutionPlan, backward: Backward, checkpoints: Sequence[Variable]) -> list[int]:
    """Return the edges of the segments: 0, the position after each checkpoint, and the number of records."""
    positions = {record.output: i for i, record in enumerate(plan.forward)}
    records = ancestors([backward.loss])
    variables = {variable for record in records for variable in (record.output, *record.inputs)}
    foreign = [v.name for v in checkpoints if v not in variables]
    if foreign:
        raise UsageError(
            f"the loss {backward.loss.name!r} does not depend on the checkpoint {foreign[0]!r}"
        )
    cuts = {positions[v] + 1 for v in checkpoints if v in positions}
    return sorted({0, *cuts, len(plan.forward)})


def _segmented(
    plan: ExecutionPlan,
    backward: BackwardPlan,
    parts: Sequence[list[Record]],
    drops: Sequence[bool],
) -> RecomputePlan:
    part_of = {record: i for i, part in enumerate(parts) for record in part}
    replays = [
        _replayed(part, backward) if drop else [] for part, drop in zip(parts, drops, strict=True)
    ]
    stay = {
        v
        for i, replay in enumerate(replays)
        for record in replay
        for v in record.inputs
        if v.record is not None and part_of.get(v.record) != i
    }
    active = set(backward.records)
    segments = []
    for part, drop, replay in zip(parts, drops, replays, strict=True):
        segments.append(
            Segment(
                part,
                drop,
                replay,
                [record for record in part if record in active],
                [record.output for record in part if record.output in stay],
                last_uses(replay, plan.kept | _made_elsewhere(replay)),
            )
        )
    return RecomputePlan(segments, stay)


def _replayed(part: Sequence[Record], backward: BackwardPlan) -> list[Record]:
    """Return the records of a segment to run again before its backward pass.

    These are the records that gradients flow through, and the records whose results they need.
    """
    active = set(backward.records)
    records = set(ancestors([record.output for record in part if record in active]))
    return [record for record in part if record in records]


def _made_elsewhere(records: Sequence[Record]) -> set[Variable]:
    """Return the inputs of these records that are computed by other records, or by no record."""
    outputs = {record.output for record in records}
    return {v for record in records for v in record.inputs if v not in outputs}


class ActivationMeter:
    """Measures the largest memory that the activations of runs occupy. Set it as `executor.meter`.

        executor.meter = ActivationMeter()
        executor.run(feed=feed, fetch_list=[loss])
        executor.meter.peak_bytes

    Attributes:
        peak_bytes: Largest number of bytes at a time in values and in saved values of forward passes.
            Excludes feeds, parameters and gradients. Memory that several arrays share counts once.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0

    def measure(self, run: ProgramRun) -> None:
        """Add up the bytes in use now, and raise the peak if they exceed it."""
        inputs = {id(owner_of(run.values[v])) for v in run.inputs if v in run.values}
        alive = {id(owner): owner.nbytes for owner in _owners(run) if id(owner) not in inputs}
        self.peak_bytes = max(self.peak_bytes, sum(alive.values()))


def _owners(run: ProgramRun) -> Iterable[Any]:
    """Yield the arrays that own the memory of the run's values and saved values, some of them repeatedly."""
    for variable, value in run.values.items():
        if isinstance(value, np.ndarray) and variable not in run.inputs:
            yield owner_of(value)
    for context in run.contexts.values():
        for value in context.saved:
            if isinstance(value, np.ndarray):
                yield owner_of(value)
