"""Stages of a pipeline: links between them, schedules, and one step as one process of a worker takes it.

A step cuts its batch into micro-batches and its program into chunks; chunk c is run by stage c mod S.
Pure: nothing is run here. Four kinds of schedule:

- `gpipe`: all forwards, then all backwards (Huang et al. 2019).
- `1f1b`: as soon as a stage can, it alternates one forward and one backward (Narayanan et al. 2021).
- `interleaved`: 1f1b with several chunks per stage, which divides the bubble by their number.
- `zero-bubble`: 1f1b with backwards split into the gradients by inputs, which the stage before waits
  for, and those by weights, which fill what would be idle (ZB-H1 of Qi et al. 2023).

The engine takes this process's part of the schedule in order, and brings values and gradients from
chunk to chunk. A subclass says how a chunk runs forward and backward, and how a value travels."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise, starmap
from typing import Any, Generic, Protocol, TypeVar, get_args

from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.kinds import Schedule as Kind

Array = NDArray[Any]


class Links(Protocol):
    """Messages between the processes of one worker, in order from each to each.

    They are numbered stage by stage: see StagePosition.
    """

    def send(self, process: int, tag: str, arrays: Sequence[Array]) -> None:
        """Send arrays to a process; they must not be changed afterwards.

        Raises:
            DeadlineExceeded: The process does not take its messages.
        """

    def receive(self, process: int, tag: str) -> list[Array]:
        """The arrays that a process has sent, or is going to send, under this tag.

        Raises:
            DeadlineExceeded: They do not come.
        """


@dataclass(frozen=True)
class StagePosition:
    """Stage of this process, and its number among the stage's copies, which take micro-batches in turn.

    Attributes:
        endpoints: Endpoints of this worker's processes: `ipc:///path` or
            `tcp://host:port`.
        counts: Number of copies of each stage; empty: one each.
    """

    worker: int = 0
    stage: int = 0
    stages: int = 1
    endpoints: tuple[str, ...] = ()
    copy: int = 0
    counts: tuple[int, ...] = ()

    @property
    def copies(self) -> tuple[int, ...]:
        """Number of copies of each stage."""
        return self.counts or (1,) * self.stages

    @property
    def processes(self) -> int:
        """Number of processes of this worker."""
        return sum(self.copies)

    @property
    def process(self) -> int:
        """This one's number among them: stage by stage, copy by copy."""
        return self.runner(self.stage, self.copy)

    @property
    def others(self) -> list[int]:
        """The other processes of this worker."""
        return [process for process in range(self.processes) if process != self.process]

    def runner(self, stage: int, micro: int) -> int:
        """The process that runs a stage's pieces on a micro-batch."""
        return sum(self.copies[:stage]) + micro % self.copies[stage]

    def name(self, process: int) -> str:
        """`worker 0 stage 1`, with the copy where there are several."""
        stage = 0
        while process >= self.copies[stage]:
            process -= self.copies[stage]
            stage += 1
        copy = f" copy {process}" if self.copies[stage] > 1 else ""
        return f"worker {self.worker} stage {stage}{copy}"


_here = StagePosition()
_make: Callable[[StagePosition, int], Links] | None = None
_links: Links | None = None
_steps = itertools.count()


def here() -> StagePosition:
    """This process's place: the only stage, unless `fleet.init()` has found others."""
    return _here


def settle(place: StagePosition, make: Callable[[StagePosition, int], Links] | None = None) -> None:
    """Say which stage this process is, and how it reaches the others once it needs to.

    Args:
        make: Makes the links, of a place and a queue size.
    """
    global _here, _make, _links, _steps
    _here, _make, _links, _steps = place, make, None, itertools.count()


def links(queue_size: int = 30) -> Links:
    """The links of this process, made when first asked for.

    Args:
        queue_size: Messages to a stage that may wait before their sender does.
    """
    global _links
    if _links is None:
        if _make is None:
            raise ConfigError(f"{_here.name(_here.process)} has no links; call fleet.init()")
        _links = _make(_here, queue_size)
    return _links


def exchange(
    place: StagePosition,
    links: Links | None,
    tag: str,
    tellers: Sequence[int],
    mine: Sequence[Array],
) -> list[Sequence[Array]]:
    """Send `mine` from each of the `tellers` to all processes of the worker; return all that were sent."""
    assert links is not None or place.processes == 1, "a process with others has links to them"
    if links is None:
        return [mine]
    if place.process in tellers:
        for process in place.others:
            links.send(process, tag, mine)
    return [mine if one == place.process else links.receive(one, tag) for one in tellers]


def next_step() -> int:
    """A number for the next step: the same in all stages, which take the same steps."""
    return next(_steps)


__all__ = ["Action", "Kind", "Schedule", "Work", "check_kind", "even_sizes", "make_schedule"]


class Work(Enum):
    """Work of a stage with one chunk and one micro-batch. BACKWARD is INPUT and WEIGHT in one."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True)
class Action:
    """A piece of work of one stage."""

    work: Work
    micro: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.work.value}{self.micro}"


@dataclass(frozen=True)
class Schedule:
    """The ordered work of each stage.

    Attributes:
        stages: For each stage its actions, in order. A chunk's micro-batches go forward in ascending
            order, and back too, so that gradients are summed in one order in every schedule.
        chunks: Number of chunks of the program: a multiple of the number of stages.
    """

    kind: Kind
    stages: tuple[tuple[Action, ...], ...]
    micro_batches: int
    chunks: int

    def stage_of(self, chunk: int) -> int:
        """The stage that runs a chunk."""
        return chunk % len(self.stages)

    def needs(self, action: Action) -> Iterator[Action]:
        """The actions that must be over before this one can begin."""
        work, m, c = action.work, action.micro, action.chunk
        back = Work.INPUT if self.kind == "zero-bubble" else Work.BACKWARD
        if work is Work.FORWARD:
            if c > 0:
                yield Action(Work.FORWARD, m, c - 1)
        elif work is Work.WEIGHT:
            yield Action(Work.INPUT, m, c)
        else:
            yield Action(Work.FORWARD, m, c)
            if c + 1 < self.chunks:
                yield Action(back, m, c + 1)


def even_sizes(samples: int, micro_batches: int) -> list[int]:
    """Samples of each micro-batch: as equal as can be, the first ones larger, none empty."""
    count = max(min(micro_batches, samples), 1)
    least, longer = divmod(samples, count)
    return [least + (i < longer) for i in range(count)]


def check_kind(kind: str) -> Kind:
    """The name of a kind of schedule.

    Raises:
        ConfigError: There is none of that name.
    """
    names: tuple[Kind, ...] = get_args(Kind)
    for name in names:
        if kind == name:
            return name
    raise ConfigError(f"pipeline schedule is {kind!r}; it must be one of {', '.join(names)}")


def make_schedule(kind: str, stages: int, micro_batches: int, per_stage: int = 1) -> Schedule:
    """The schedule of a kind.

    Args:
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        per_stage: Chunks of each stage.

    Raises:
        ConfigError: A number is below 1.
    """
    schedule_kind = check_kind(kind)
    for name, number in (
        ("stages", stages),
        ("micro_batches", micro_batches),
        ("chunks", per_stage),
    ):
        if number < 1:
            raise ConfigError(f"pipeline {name} is {number}; it must be at least 1")
    if schedule_kind == "zero-bubble" and per_stage > 1 and stages > 1:
        raise ConfigError(
            f"pipeline schedule zero-bubble has {per_stage} chunks per stage; "
            "it works with 1, interleaved with several"
        )
    make = _zero_bubble if schedule_kind == "zero-bubble" and per_stage == 1 else _of_stage
    lists = [
        make(schedule_kind, stage, stages, micro_batches, per_stage) for stage in range(stages)
    ]
    return Schedule(schedule_kind, tuple(map(tuple, lists)), micro_batches, stages * per_stage)


def _of_stage(
    kind: Kind, stage: int, stages: int, micro_batches: int, per_stage: int
) -> list[Action]:
    groups = _groups(stages, micro_batches)
    forward, backward = _groupings(stage, stages, groups, per_stage, kind == "zero-bubble")
    if kind == "gpipe":
        forward = sorted(forward, key=lambda group: group[0].chunk)
        backward = sorted(backward, key=lambda group: -group[0].chunk)
        return _flat(forward + backward)
    if stages == 1:
        return _flat(sorted(forward + backward, key=lambda group: group[0].micro))
    ahead = stages - 1 - stage
    if per_stage > 1:
        ahead = 2 * ahead + (per_stage - 1) * len(groups[0])
    ahead = len(forward) if per_stage > 1 and micro_batches < stages else min(ahead, len(forward))
    in_turn = forward[:ahead]
    for one_forward, one_backward in zip(forward[ahead:], backward, strict=False):
        in_turn += [one_forward, one_backward]
    return _flat(in_turn + backward[len(forward) - ahead :])


def _groups(stages: int, micro_batches: int) -> list[range]:
    """The micro-batches by as many as there are stages; what is left over makes the first longer."""
    first = min(micro_batches, stages + micro_batches % stages)
    return list(starmap(range, pairwise([0, *range(first, micro_batches + 1, stages)])))


def _groupings(
    stage: int, stages: int, groups: list[range], per_stage: int, split: bool
) -> tuple[list[list[Action]], list[list[Action]]]:
    """Forwards and backwards: each group goes through one chunk after the other."""
    forward, backward = [], []
    for group in groups:
        for i in range(per_stage):
            forward += [[Action(Work.FORWARD, m, i * stages + stage)] for m in group]
            chunk = (per_stage - 1 - i) * stages + stage
            backward += [_back(m, chunk, split) for m in group]
    return forward, backward


def _back(micro: int, chunk: int, split: bool) -> list[Action]:
    works = (Work.INPUT, Work.WEIGHT) if split else (Work.BACKWARD,)
    return [Action(work, micro, chunk) for work in works]


def _flat(groups: list[list[Action]]) -> list[Action]:
    return [action for group in groups for action in group]


def _zero_bubble(
    kind: Kind, stage: int, stages: int, micro_batches: int, per_stage: int
) -> list[Action]:
    """1f1b in which stage s is s weight gradients behind: they are done where it would be idle.

    No stage keeps more micro-batches alive than the first stage of 1f1b does.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    works = [(Work.FORWARD, m) for m in range(ahead)]
    for m in range(micro_batches):
        if ahead + m < micro_batches:
            works.append((Work.FORWARD, ahead + m))
        works.append((Work.INPUT, m))
        if m >= stage:
            works.append((Work.WEIGHT, m - stage))
    works += [(Work.WEIGHT, m) for m in range(max(micro_batches - stage, 0), micro_batches)]
    return [Action(work, m, stage) for work, m in works]


Value = TypeVar("Value")


class PipelineEngine(ABC, Generic[Value]):
    """One step. A subclass has functions for what chunks give each other:

    - `_settled`: The value as another chunk gets it: in the same process the same bits as elsewhere.
    - `_pack`: A settled value as a message.
    - `_unpack`: What was packed.

    Args:
        schedule: Schedule of all stages.
        sizes: Samples of each micro-batch.
        place: Stage of this process.
        links: To the other processes; None if there are none.
        number: Number of the step: the same in all stages, never the same twice.
    """

    _settled: Callable[[Any], Any]
    _pack: Callable[[Any], list[Array]]
    _unpack: Callable[[Sequence[Array]], Any]

    def __init__(
        self,
        schedule: Schedule,
        sizes: Sequence[int],
        place: StagePosition,
        links: Links | None,
        number: int,
    ) -> None:
        self._schedule = schedule
        self._sizes = sizes
        self._fractions = [size / sum(sizes) for size in sizes]
        self._place = place
        self._links = links
        self._number = number
        self._mail: dict[str, Value] = {}  # between chunks of this process

    def _take_actions(self) -> None:
        """Run what the schedule has for this process. Copies of a stage take micro-batches in turn."""
        copies = self._place.copies[self._place.stage]
        for action in self._schedule.stages[self._place.stage]:
            if action.micro % copies == self._place.copy:
                self._perform(action)

    def _perform(self, action: Action) -> None:
        if action.work is Work.FORWARD:
            self._forward(action.chunk, action.micro)
        else:
            self._backward(action)

    @abstractmethod
    def _forward(self, chunk: int, micro: int) -> None:
        """Compute a chunk: take what it needs, give what others need."""

    @abstractmethod
    def _backward(self, action: Action) -> None:
        """Compute gradients of a chunk, likewise."""

    # -- between chunks ------------------------------------------------------------------------

    def _give(self, way: str, chunk: int, micro: int, value: Value, name: str = "") -> None:
        """Leave a value for a chunk.

        Args:
            way: `forward` or `back`.
            chunk, micro: For which chunk, and of which micro-batch.
            value: It must not be changed afterwards.
            name: Tells several values apart.
        """
        process = self._runner(chunk, micro)
        tag, value = self._tag(way, chunk, micro, name), self._settled(value)
        if process == self._place.process:
            self._mail[tag] = value
        else:
            self._far().send(process, tag, self._pack(value))

    def _take(self, way: str, chunk: int, micro: int, source: int, name: str = "") -> Value:
        """The value that the chunk `source` has given to `chunk`."""
        process, tag = self._runner(source, micro), self._tag(way, chunk, micro, name)
        if process == self._place.process:
            return self._mail.pop(tag)
        value: Value = self._unpack(self._far().receive(process, tag))
        return value

    def _exchange(
        self, what: str, tellers: Sequence[int], mine: Sequence[Array]
    ) -> list[Sequence[Array]]:
        """Send `mine`, if this process is one of the `tellers`, to all of them; return all that were sent."""
        return exchange(self._place, self._links, f"{self._number}/{what}", tellers, mine)

    def _runner(self, chunk: int, micro: int) -> int:
        return self._place.runner(self._schedule.stage_of(chunk), micro)

    def _tag(self, way: str, chunk: int, micro: int, name: str) -> str:
        return f"{self._number}/{way}/{micro}/{chunk}/{name}"

    def _far(self) -> Links:
        assert self._links is not None, "a single process has no links"
        return self._links
