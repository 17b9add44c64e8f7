"""Cuts of a program into pieces of equal work, as shapes or measured times tell."""

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
"""A piece may be this much heavier than it must be if that saves bytes between stages."""


_TIMES = 5, 20
"""At least: other processes, and what is done the first time only, must not count; and at most."""
_ENOUGH = 0.5  # seconds of measuring after which the least times do


def weight_of(record: Record) -> float:
    """The work of a record for one sample, as far as its shapes tell: its parameters and results.

    Only for cuts before anything was measured (see `agree_on_parts`).
    """
    dense = [v for v in record.inputs if v.parameter is not None and not v.parameter.sparse]
    return float(sum(_size(v) for v in dense) + _size(record.output))


def _size(variable: Variable) -> int:
    return math.prod(extent or 1 for extent in variable.shape)


def records_of(plan: ExecutionPlan, count: int) -> list[Record]:
    """The records of the plan's loss, in forward order.

    Raises:
        ConfigError: There are fewer than the `count` parts that they are to be cut into.
    """
    loss_records = {r for backward in plan.backwards for r in ancestors([backward.backward.loss])}
    records = [record for record in plan.forward if record in loss_records]
    if len(records) < count:
        raise ConfigError(
            f"the program has {len(records)} operations, too few for {count} pieces of a "
            "pipeline; use fewer stages"
        )
    return records


def edges_of(records: Sequence[Record], weights: Sequence[float], count: int) -> list[int]:
    """Return the edges of `count` runs of neighbours: 0 < ... < the number of records.

    Args:
        weights: The work of each record, in any unit.
    """
    return balanced_edges(weights, _crossing(records), count)


def parts_of(plan: ExecutionPlan, edges: Sequence[int]) -> list[list[Record]]:
    """The records of the plan's loss, cut there."""
    records = records_of(plan, len(edges) - 1)
    return [records[start:end] for start, end in pairwise(edges)]


def balanced_parts(plan: ExecutionPlan, count: int) -> list[list[Record]]:
    """The records of the plan's loss in `count` parts of about equal work, as far as shapes tell."""
    records = records_of(plan, count)
    return parts_of(plan, edges_of(records, [weight_of(record) for record in records], count))


def _crossing(records: Sequence[Record]) -> list[int]:
    """For each position the values for one sample that are made before and used after it."""
    places = {record.output: i for i, record in enumerate(records)}
    last = {v: i for i, record in enumerate(records) for v in record.inputs if v in places}
    sizes = np.zeros(len(records) + 1, np.int64)
    for variable, user in last.items():
        sizes[places[variable] + 1 : user + 1] += _size(variable)
    return [int(size) for size in sizes]


def balanced_edges(weights: Sequence[float], crossing: Sequence[int], count: int) -> list[int]:
    """Edges of least crossing among those whose heaviest part is within reach of the least.

    Args:
        crossing: Before each operation, and at the end, how much crosses an edge there.

    Returns:
        0 < ... < len(weights): `count` parts lie between them.
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
    """The cheapest edges 0 < ... < n of `count` parts; `price(before, i, j)` adds the part [i, j)."""
    length = len(total) - 1
    best = {0: (0.0, [0])}
    for part in range(1, count + 1):
        longer: dict[int, tuple[float, list[int]]] = {}
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
    """The loss's records in `count` parts of about equal time, the same in all stages of a worker.

    The first stage measures one micro-batch through the whole program, keeping no activation, and
    tells the others. No result depends on where it is cut.

    Raises:
        ConfigError: There are fewer records than parts.
    """
    mine = []
    if not place.process:
        records = records_of(plan, count)
        first = micro_feeds(feeds, micro_sizes(feeds, micro_batches))[0]
        seconds = measure(program, plan, first, records)
        mine = [np.array(edges_of(records, seconds, count), np.int64)]
    [[edges]] = exchange(place, links, tag, [0], mine)
    return parts_of(plan, edges.tolist())


def measure(
    program: Program,
    plan: ExecutionPlan,
    feeds: Mapping[Variable, Array],
    records: Sequence[Record],
) -> list[float]:
    """Seconds that each record takes, forward and back; the least of a few times."""
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
    begin = time.perf_counter()
    value = compute(record.op, context, inputs, record.output.dtype)
    if any(needs):
        record.op.backward(context, np.ones_like(value))
    seconds = time.perf_counter() - begin
    run.values[record.output] = value
    for variable in releases.get(record, ()):
        run.values.pop(variable, None)
    return seconds
