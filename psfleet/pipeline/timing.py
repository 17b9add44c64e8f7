"""Where to cut by measured times: one process measures a micro-batch, and all cut where it says."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from psfleet.parameters.parameter import fetch
from psfleet.pipeline.balance import edges_of, parts_of, records_of
from psfleet.pipeline.micro_batches import micro_feeds, micro_sizes
from psfleet.program.operation import Array, Context, Record
from psfleet.program.plan import ExecutionPlan, last_uses
from psfleet.program.program import Program
from psfleet.program.run import ProgramRun
from psfleet.program.variable import Variable, compute
from psfleet.stages.links import Links, StagePosition, exchange

__all__ = ["agree_on_parts", "measure"]

_TIMES = (
    5,
    20,
)  # at least: other processes, and what is done the first time only, must not count; at most
_ENOUGH = 0.5  # seconds of measuring after which the least times do


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
        found = edges_of(records, measure(program, plan, first, records), count)
        mine = [np.array(found, np.int64)]
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
    fetch([v.parameter for v in plan.dense if v.parameter], plan.asked(run.values))
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
    taken = time.perf_counter() - begin
    run.values[record.output] = value
    for variable in releases.get(record, ()):
        run.values.pop(variable, None)
    return taken
