"""Simulation of a schedule: its timeline, bubble, memory and picture, without running it."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from psfleet.errors import ConfigError
from psfleet.stages.schedule import Action, Schedule, Work

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
