"""Estimates of a pipeline before it runs: cuts into equal work, and a schedule's timeline and memory."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from psfleet.core.runtime.stages import Action, Links, Schedule, StagePosition, Work, exchange

Costs = Mapping[Work, float] | Callable[[Action], float]
"""Seconds of an action: by its work, or by itself."""

EQUAL: Mapping[Work, float] = {Work.FORWARD: 1, Work.BACKWARD: 2, Work.INPUT: 1, Work.WEIGHT: 1}


@dataclass(frozen=True)
class Timeline:
    """Start and end of all work of a schedule.

    Attributes:
        busy: Seconds that each stage works.
        length: Seconds from the first begin to the last end.
    """

    spans: dict[Action, tuple[float, float]]
    busy: tuple[float, ...]
    length: float

    @property
    def bubble(self) -> float:
        """The share of the stages' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.length)


def validate(schedule: Schedule, queue_size: int = 30) -> None:
    """Refuse a schedule that misses or repeats work, mixes up an order or cannot come to an end.

    Raises:
        ConfigError: Says what is wrong.
    """
    works = {
        Work.FORWARD,
        *({Work.INPUT, Work.WEIGHT} if schedule.kind == "zero-bubble" else {Work.BACKWARD}),
    }
    for stage, actions in enumerate(schedule.stages):
        for chunk in range(stage, schedule.chunks, len(schedule.stages)):
            for work in works:
                order = [a.micro for a in actions if (a.chunk, a.work) == (chunk, work)]
                if order != list(range(schedule.micro_batches)):
                    raise ConfigError(
                        f"stage {stage} does {work.value} of chunk {chunk} for the "
                        f"micro-batches {order}; it must be each once, in order"
                    )
        count = len(works) * schedule.micro_batches * schedule.chunks // len(schedule.stages)
        if len(actions) != count:
            raise ConfigError(f"stage {stage} has {len(actions)} actions; it must have {count}")
    simulate(schedule, EQUAL, queue_size)


def simulate(schedule: Schedule, costs: Costs = EQUAL, queue_size: int = 30) -> Timeline:
    """Run the schedule on paper; what travels takes no time.

    Args:
        queue_size: Number of results for a chunk that may wait before their maker must.

    Raises:
        ConfigError: Stages would wait for each other for ever.
    """
    price = costs if callable(costs) else lambda action: costs[action.work]
    spans: dict[Action, tuple[float, float]] = {}
    places = [0] * len(schedule.stages)
    clocks = [0.0] * len(schedule.stages)
    busy = [0.0] * len(schedule.stages)
    waiting: Counter[tuple[Work, int]] = Counter()
    goes_on = True
    while goes_on:
        goes_on = False
        for stage, actions in enumerate(schedule.stages):
            while places[stage] < len(actions):
                action = actions[places[stage]]
                needs = list(schedule.needs(action))
                after = _next_chunk(schedule, action)
                is_full = after is not None and waiting[action.work, after] >= queue_size
                if is_full or any(n not in spans for n in needs):
                    break
                begin = max([clocks[stage], *(spans[n][1] for n in needs)])
                spans[action] = begin, begin + price(action)
                clocks[stage] = spans[action][1]
                busy[stage] += price(action)
                if waiting[action.work, action.chunk]:
                    waiting[action.work, action.chunk] -= 1
                if after is not None:
                    waiting[action.work, after] += 1
                places[stage] += 1
                goes_on = True
    stuck = [
        str(actions[place])
        for actions, place in zip(schedule.stages, places, strict=True)
        if place < len(actions)
    ]
    if stuck:
        raise ConfigError(
            f"the schedule {schedule.kind} stands still before {', '.join(stuck)} with "
            f"queues of {queue_size}; allow longer queues"
        )
    return Timeline(spans, tuple(busy), max(clocks))


def _next_chunk(schedule: Schedule, action: Action) -> int | None:
    """The chunk that waits for the action's result, if another stage runs it."""
    if len(schedule.stages) == 1 or action.work is Work.WEIGHT:
        return None
    after = action.chunk + (1 if action.work is Work.FORWARD else -1)
    return after if 0 <= after < schedule.chunks else None


def live_micro_batches(schedule: Schedule, stage: int) -> int:
    """The most forwards of a stage, over its chunks, whose activations are kept at once."""
    live = peak = 0
    last = Work.WEIGHT if schedule.kind == "zero-bubble" else Work.BACKWARD
    for action in schedule.stages[stage]:
        live += (action.work is Work.FORWARD) - (action.work is last)
        peak = max(peak, live)
    return peak


def picture(schedule: Schedule) -> str:
    """One line per stage over time: `F` forward, `B` backward, `I` and `W` its two halves, `.` idle.

    A cell is the shortest action; the digits are micro-batches. Lines are cut at 100 characters.
    """
    timeline = simulate(schedule)
    cell = min(end - begin for begin, end in timeline.spans.values()) or 1.0
    size = 1 + len(str(schedule.micro_batches - 1))
    lines = []
    for stage, actions in enumerate(schedule.stages):
        cells = ["." * size] * round(timeline.length / cell)
        for action in actions:
            begin, end = (round(t / cell) for t in timeline.spans[action])
            name = f"{action.work.value}{action.micro:0{size - 1}d}"
            cells[begin:end] = [name] + ["-" * size] * (end - begin - 1)
        text = " ".join(cells)
        lines.append(f"stage {stage}  {text if len(text) <= 100 else text[:97] + '...'}")
    return "\n".join(lines)


Floats = NDArray[np.float64]
_SLACK = 1.1
"""A piece may be this much heavier than it must be if that saves bytes between stages."""


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


_TIMES = 5, 20
"""At least: other processes, and what is done the first time only, must not count; and at most."""
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
    seconds = time.perf_counter() - begin
    run.values[record.output] = value
    for variable in releases.get(record, ()):
        run.values.pop(variable, None)
    return seconds
