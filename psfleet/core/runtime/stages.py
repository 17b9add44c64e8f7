"""Stages of a pipeline: links between them, schedules, and one step as one process of a worker takes it.

A step cuts its batch into micro-batches and its program into pieces. Each stage runs as many pieces as the
others, side by side, and takes every micro-batch through them, in one of two orders:

- `gpipe`: all forwards, then all backwards (Huang et al. 2019).
- `1f1b`: as soon as a stage can, it alternates one forward and one backward (Narayanan et al. 2021).

The engine takes this process's work in order, and brings values and gradients from stage to stage. A
subclass says how a micro-batch runs forward and backward, and how a value travels."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.kinds import Schedule

Array = NDArray[Any]


_steps = itertools.count()
Value = TypeVar("Value")


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


@dataclass(frozen=True)
class Action:
    """Work of a stage: a micro-batch goes forward through its pieces, or back."""

    forward: bool
    micro: int


def make_schedule(kind: Schedule, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """The ordered work of a stage.

    Micro-batches go forward in ascending order, and back too, so that gradients are summed in one order in
    every schedule.
    """
    ahead = _forwards_ahead(kind, stage, stages, micro_batches)
    forward = [Action(True, micro) for micro in range(micro_batches)]
    backward = [Action(False, micro) for micro in range(micro_batches)]
    in_turn = forward[:ahead]
    for one_forward, one_backward in zip(forward[ahead:], backward, strict=False):
        in_turn += [one_forward, one_backward]
    return in_turn + backward[micro_batches - ahead :]


def live_micro_batches(kind: Schedule, stage: int, stages: int, micro_batches: int) -> int:
    """The most micro-batches whose activations a stage keeps at once."""
    return min(_forwards_ahead(kind, stage, stages, micro_batches) + 1, micro_batches)


def _forwards_ahead(kind: Schedule, stage: int, stages: int, micro_batches: int) -> int:
    """The forwards before those that alternate with backwards."""
    return micro_batches if kind == "gpipe" else min(stages - 1 - stage, micro_batches)


def even_sizes(samples: int, micro_batches: int) -> list[int]:
    """Samples of each micro-batch: as equal as can be, the first ones larger, none empty."""
    count = max(min(micro_batches, samples), 1)
    least, longer = divmod(samples, count)
    return [least + (i < longer) for i in range(count)]


class PipelineEngine(ABC, Generic[Value]):
    """One step. A subclass has functions for what stages give each other:

    - `_pack`: A value as a message.
    - `_unpack`: What was packed.

    Args:
        kind: Schedule of all stages.
        sizes: Samples of each micro-batch.
        place: Stage of this process.
        links: To the other processes; None if there are none.
        number: Number of the step: the same in all stages, never the same twice.
    """

    _pack: Callable[[Any], list[Array]]
    _unpack: Callable[[Sequence[Array]], Any]

    def __init__(
        self,
        kind: Schedule,
        sizes: Sequence[int],
        place: StagePosition,
        links: Links | None,
        number: int,
    ) -> None:
        self._kind = kind
        self._sizes = sizes
        self._fractions = [size / sum(sizes) for size in sizes]
        self._place = place
        self._links = links
        self._number = number

    def _take_actions(self) -> None:
        """Run what the schedule has for this process. Copies of a stage take micro-batches in turn."""
        place = self._place
        copies = place.copies[place.stage]
        for action in make_schedule(self._kind, place.stage, place.stages, len(self._sizes)):
            if action.micro % copies == place.copy:
                run = self._forward if action.forward else self._backward
                run(action.micro)

    @abstractmethod
    def _forward(self, micro: int) -> None:
        """Compute a micro-batch: take what it needs, give what others need."""

    @abstractmethod
    def _backward(self, micro: int) -> None:
        """Compute the gradients of a micro-batch, likewise."""

    # -- between stages ------------------------------------------------------------------------

    def _send(self, way: str, stage: int, micro: int, value: Value, name: str = "") -> None:
        """Send a value to another stage.

        Args:
            way: `forward` or `back`.
            stage, micro: For which stage, and of which micro-batch.
            value: It must not be changed afterwards.
            name: Tells several values apart.
        """
        process = self._place.runner(stage, micro)
        self._far().send(process, self._tag(way, micro, name), self._pack(value))

    def _receive(self, way: str, stage: int, micro: int, name: str = "") -> Value:
        """The value that another stage sends to this one; arguments as for `_send`."""
        process = self._place.runner(stage, micro)
        value: Value = self._unpack(self._far().receive(process, self._tag(way, micro, name)))
        return value

    def _exchange(
        self, what: str, tellers: Sequence[int], mine: Sequence[Array]
    ) -> list[Sequence[Array]]:
        """Send `mine`, if this process is one of the `tellers`, to all of them; return all that were sent."""
        return exchange(self._place, self._links, f"{self._number}/{what}", tellers, mine)

    def _tag(self, way: str, micro: int, name: str) -> str:
        return f"{self._number}/{way}/{micro}/{name}"

    def _far(self) -> Links:
        assert self._links is not None, "a single process has no links"
        return self._links
