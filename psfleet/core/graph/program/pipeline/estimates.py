"""Balanced cuts of a program: finds chunks of about equal work, from shapes or from measured times.

A pipeline is as fast as its slowest stage. So the heaviest chunk should be as light as possible. Among the
cuts whose heaviest chunk is within 10 % of that optimum, the cut that sends the fewest bytes between stages
is chosen. Both steps are solved exactly by the same dynamic program (`_partition`), with different prices.

In a run with several stages, the first step measures times (`agree_on_parts`). A plan that is cut earlier is
cut by shapes alone.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError
from psfleet.core.graph.parameters.parameter import fetch
from psfleet.core.graph.program.operation import Array, Context, Record, ancestors
from psfleet.core.graph.program.pipeline.chunk import micro_feeds, micro_sizes
from psfleet.core.graph.program.program import Program
from psfleet.core.graph.program.run import ExecutionPlan, ProgramRun, last_uses
from psfleet.core.graph.program.variable import Variable, compute
from psfleet.core.runtime.stages import Links, StagePosition, exchange

Floats = NDArray[np.float64]
_SLACK = 1.1
"""Factor by which the heaviest chunk may exceed the optimum, to send fewer bytes between stages."""


_TIMES = 5, 20
"""Smallest and largest number of measurements.

Only the shortest time is used, so that other processes, and work that is done only the first time, do not
distort it.
"""
_ENOUGH = 0.5  # seconds of measured operations after which no more than the smallest number is done


def weight_of(record: Record) -> float:
    """Estimate the work of a record for one sample: the size of its dense parameters and its output.

    Used only if nothing was measured (see `agree_on_parts`).
    """
    dense = [v for v in record.inputs if v.parameter is not None and not v.parameter.sparse]
    return float(sum(_size(v) for v in dense) + _size(record.output))


def _size(variable: Variable) -> int:
    """Return the number of values for one sample. Unknown extents count as 1."""
    return math.prod(extent or 1 for extent in variable.shape)


def records_of(plan: ExecutionPlan, count: int) -> list[Record]:
    """Return the records of the plan's loss, in forward order.

    Raises:
        ConfigError: There are fewer records than `count`, the number of chunks to cut.
    """
    loss_records = {r for backward in plan.backwards for r in ancestors([backward.backward.loss])}
    records = [record for record in plan.forward if record in loss_records]
    if len(records) < count:
        raise ConfigError(
            f"the program has {len(records)} operations, too few for {count} sections of a "
            "pipeline; use fewer stages"
        )
    return records


def edges_of(records: Sequence[Record], weights: Sequence[float], count: int) -> list[int]:
    """Return the edges of `count` chunks of about equal work.

    Edges are the positions in `records` at which chunks begin, and the end: 0 < ... < the number of records.

    Args:
        records: Records of a loss, in forward order.
        weights: Work of each record, in any unit.
    """
    return balanced_edges(weights, _crossing(records), count)


def parts_of(plan: ExecutionPlan, edges: Sequence[int]) -> list[list[Record]]:
    """Divide the records (uses of operations) of the plan's loss into chunks.

    `edges`: Positions of the records at which chunks begin, and the end: 0 < ... < the number of records.
    """
    records = records_of(plan, len(edges) - 1)
    return [records[start:end] for start, end in pairwise(edges)]


def balanced_parts(plan: ExecutionPlan, count: int) -> list[list[Record]]:
    """Return the records of the plan's loss in `count` chunks of about equal work, estimated from shapes."""
    records = records_of(plan, count)
    return parts_of(plan, edges_of(records, [weight_of(record) for record in records], count))


def _crossing(records: Sequence[Record]) -> list[int]:
    """Return, for each position, how many values per sample are computed before it and used after it."""
    positions = {record.output: i for i, record in enumerate(records)}
    last = {v: i for i, record in enumerate(records) for v in record.inputs if v in positions}
    sizes = np.zeros(len(records) + 1, np.int64)
    for variable, user in last.items():
        sizes[positions[variable] + 1 : user + 1] += _size(variable)
    return [int(size) for size in sizes]


def balanced_edges(weights: Sequence[float], crossing: Sequence[int], count: int) -> list[int]:
    """Return edges that send few values, while the heaviest chunk is at most 10 % above the optimum.

    Args:
        weights: Work of each operation, in any unit.
        crossing: Number of values that are computed before a position and used after it, for the position
            before each operation and for the end.

    Returns:
        `count` + 1 edges: 0 < ... < len(weights).
    """
    total = np.concatenate([[0.0], np.cumsum(weights)])
    heaviest = _partition(total, count, lambda before, i, j: max(before, total[j] - total[i]))[0]
    limit = heaviest * _SLACK

    def sent(before: float, i: int, j: int) -> float:
        return math.inf if total[j] - total[i] > limit else before + crossing[i]

    return _partition(total, count, sent)[1]


def _partition(
    total: Floats, count: int, price: Callable[[float, int, int], float]
) -> tuple[float, list[int]]:
    """Return the lowest price of `count` chunks and their edges 0 < ... < n, by dynamic programming.

    Args:
        total: Cumulative weights, n + 1 values.
        price: Function that adds a chunk. It is called with the price of the earlier chunks, and with i and
            j. It returns the price that includes the chunk [i, j).
    """
    length = len(total) - 1
    best = {0: (0.0, [0])}  # by end: lowest price of the parts so far, and their edges
    for part in range(1, count + 1):
        longer: dict[int, tuple[float, list[int]]] = {}
        # Each chunk needs at least one operation, so enough operations must remain after j for the later
        # chunks.
        ends = range(part, length - (count - part) + 1) if part < count else [length]
        for j in ends:
            offers = [
                (price(cost, i, j), [*edges, j]) for i, (cost, edges) in best.items() if i < j
            ]
            longer[j] = min(offers)
        best = longer
    return best[length]


def agree_on_parts(
    program: Program,
    plan: ExecutionPlan,
    feeds: Mapping[Variable, Array],
    micro_batches: int,
    count: int,
    place: StagePosition,
    links: Links | None,
    tag: str,
) -> list[list[Record]]:
    """Divide the loss's records (uses of operations) into `count` chunks of about equal time.

    All stages of a worker get the same chunks. The first stage measures the whole program on one micro-batch,
    without keeping activations, and sends the positions of the cuts to the other stages. The measured times
    affect only the speed: results are the same for any cut.

    Raises:
        ConfigError: There are fewer records than chunks.
    """
    edges_to_tell = []
    if not place.process:
        records = records_of(plan, count)
        first = micro_feeds(feeds, micro_sizes(feeds, micro_batches))[0]
        seconds = measure(program, plan, first, records)
        edges_to_tell = [np.array(edges_of(records, seconds, count), np.int64)]
    [[edges]] = exchange(place, links, tag, [0], edges_to_tell)
    return parts_of(plan, edges.tolist())


def measure(
    program: Program,
    plan: ExecutionPlan,
    feeds: Mapping[Variable, Array],
    records: Sequence[Record],
) -> list[float]:
    """Return the seconds that each record (use of an operation) takes for its forward and backward pass.

    Each is the shortest of several measurements.
    """
    run = ProgramRun(program, plan, dict(feeds))
    run.forward(plan.early)
    fetch([v.parameter for v in plan.dense if v.parameter], plan.wanted_reads(run.values))
    run.take_parameters()
    releases = last_uses(records, {v for v in run.values if isinstance(v, Variable)})
    rounds: list[list[float]] = []
    while len(rounds) < _TIMES[0] or (len(rounds) < _TIMES[1] and sum(map(sum, rounds)) < _ENOUGH):
        rounds.append([_seconds(run, record, releases) for record in records])
    return [min(times) for times in zip(*rounds, strict=True)]


def _seconds(run: ProgramRun, record: Record, releases: Mapping[Record, list[Any]]) -> float:
    needs = run.plan.needs.get(record, ())
    context = Context(run.program, record, needs or (False,) * len(record.inputs))
    inputs = [run.input(variable) for variable in record.needed(any(needs))]
    # Run the operation's backward pass at once, with a gradient of ones, so that no context is kept.
    begin = time.perf_counter()
    value = compute(record.op, context, inputs, record.output.dtype)
    if any(needs):
        record.op.backward(context, np.ones_like(value))
    seconds = time.perf_counter() - begin
    run.values[record.output] = value
    for variable in releases.get(record, ()):
        run.values.pop(variable, None)
    return seconds
