"""Pipeline parallelism: the position of a process, the schedules, and one step of one process.

A step divides its batch into micro-batches, and its program into sections, which are divided among processes
called stages. Every stage runs its sections on each micro-batch, in one of two schedules. With 2 stages and 4
micro-batches (F forward, B backward):

    gpipe  stage 0   F0 F1 F2 F3       B0 B1 B2 B3    all forwards, then all backwards (Huang et al. 2019)
           stage 1      F0 F1 F2 F3 B0 B1 B2 B3
    1f1b   stage 0   F0 F1    B0 F2 B1 F3 B2    B3    one forward, one backward (Narayanan et al. 2021)
           stage 1      F0 B0 F1 B1 F2 B2 F3 B3

Both take the same time. 1f1b keeps fewer activations: stage s of S keeps those of at most S - s
micro-batches.

`PipelineEngine` runs this process's part of the schedule in the calling thread, and sends values and
gradients to other stages. A derived class implements how a micro-batch runs forward and backward, and how a
value becomes a message. There is one for programs and one for torch.
"""

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
    """Channel between the processes (stages) of one worker, through which they send each other arrays.

    Messages from one process to another keep their order. Processes are numbered as in StagePosition.
    """

    def send(self, process: int, tag: str, arrays: Sequence[Array]) -> None:
        """Send arrays to a process. The caller must not change them afterwards.

        Args:
            tag: Text that `receive` uses to find the message.

        Raises:
            DeadlineExceeded: The process does not read its messages.
        """

    def receive(self, process: int, tag: str) -> list[Array]:
        """Wait for the arrays that a process sends with this tag, and return them.

        Raises:
            DeadlineExceeded: The arrays do not arrive.
        """


@dataclass(frozen=True)
class StagePosition:
    """Position of this process in its worker's pipeline.

    A stage may have several copies, each a process, which take micro-batches in turn. The processes of a
    worker are numbered stage by stage, and copy by copy within a stage.

    Attributes:
        worker: Rank of the worker.
        stage: Index of this process's stage.
        endpoints: Endpoints of this worker's processes: `ipc:///path` or `tcp://host:port`.
        copy: Index of this process among the copies of its stage.
        counts: Number of copies of each stage, or empty if each stage has one.
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
        """Number of this process among the worker's processes."""
        return self.runner(self.stage, self.copy)

    @property
    def others(self) -> list[int]:
        """Numbers of this worker's other processes."""
        return [process for process in range(self.processes) if process != self.process]

    def runner(self, stage: int, micro: int) -> int:
        """Return the number of the process that runs a stage's sections on a micro-batch."""
        return sum(self.copies[:stage]) + micro % self.copies[stage]

    def name(self, process: int) -> str:
        """Return a process's name for messages: `worker 0 stage 1`, or `worker 0 stage 1 copy 2`."""
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
    """Return the position of this process.

    It is the only stage unless `fleet.init()` has set another position.
    """
    return _here


def settle(place: StagePosition, make: Callable[[StagePosition, int], Links] | None = None) -> None:
    """Set the position of this process, and the function that makes its links when they are first used.

    Args:
        make: Function that makes the links from a position and a queue size.
    """
    global _here, _make, _links, _steps
    _here, _make, _links, _steps = place, make, None, itertools.count()


def links(queue_size: int = 30) -> Links:
    """Return the links of this process to the other stages. The first call makes them.

    Args:
        queue_size: Number of messages to a process that may wait before `send` blocks.

    Raises:
        ConfigError: `fleet.init()` was not called.
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
    """Exchange arrays within a worker: processes in `tellers` send arrays, and all processes get them.

    Args:
        links: Links to the other processes, or None if there are none.
        tag: Tag of the messages, the same in all processes and used only once.
        mine: Arrays of this process. They are ignored if this process is not among `tellers`.

    Returns:
        The arrays of each sender, in the order of `tellers`.
    """
    assert links is not None or place.processes == 1, "a process with others has links to them"
    if links is None:
        return [mine]
    if place.process in tellers:
        for process in place.others:
            links.send(process, tag, mine)
    return [mine if sender == place.process else links.receive(sender, tag) for sender in tellers]


def next_step() -> int:
    """Return the number of the next step. It is the same in all stages, because all make the same steps."""
    return next(_steps)


@dataclass(frozen=True)
class Action:
    """Run of one micro-batch, forward or backward, through a stage's sections: the unit of a schedule."""

    forward: bool
    micro: int


def make_schedule(kind: Schedule, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the actions of a stage in the order in which it runs them.

    Micro-batches run forward in ascending order, and backward in ascending order too. Gradients are therefore
    summed in the same order in every schedule, and are bit-identical.

    Args:
        kind: "gpipe" or "1f1b".
    """
    ahead = _forwards_ahead(kind, stage, stages, micro_batches)
    forward = [Action(True, micro) for micro in range(micro_batches)]
    backward = [Action(False, micro) for micro in range(micro_batches)]
    in_turn = forward[:ahead]
    for one_forward, one_backward in zip(forward[ahead:], backward, strict=False):
        in_turn += [one_forward, one_backward]
    return in_turn + backward[micro_batches - ahead :]


def live_micro_batches(kind: Schedule, stage: int, stages: int, micro_batches: int) -> int:
    """Return the largest number of micro-batches whose activations a stage keeps at the same time."""
    return min(_forwards_ahead(kind, stage, stages, micro_batches) + 1, micro_batches)


def _forwards_ahead(kind: Schedule, stage: int, stages: int, micro_batches: int) -> int:
    """Return the number of forwards at the start of a schedule, before forwards and backwards alternate.

    In the schedule 1f1b the last stage needs none: it can go back at once. Each stage before it has one more.
    """
    return micro_batches if kind == "gpipe" else min(stages - 1 - stage, micro_batches)


def even_sizes(samples: int, micro_batches: int) -> list[int]:
    """Divide `samples` into micro-batches of nearly equal size, and return the sizes.

    There are at most `micro_batches`, each with at least one sample. Larger ones are first.
    """
    count = max(min(micro_batches, samples), 1)
    smallest, longer = divmod(samples, count)
    return [smallest + (i < longer) for i in range(count)]


class PipelineEngine(ABC, Generic[Value]):
    """Base of the pipelined step of one process. A derived class runs the sections, and converts messages:

    - `_pack` converts a value to arrays.
    - `_unpack` converts these arrays back to the value.

    Args:
        links: Links to the other processes, or None if there are none.
        number: Number of the step. It is part of every tag, so it must be the same in all stages and must not
            be used again.
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
        """Run this process's actions (a micro-batch forward or backward) in the order of the schedule.

        If several processes are copies of one stage, they take micro-batches in turn.
        """
        position = self._place
        copies = position.copies[position.stage]
        for action in make_schedule(self._kind, position.stage, position.stages, len(self._sizes)):
            if action.micro % copies == position.copy:
                run = self._forward if action.forward else self._backward
                run(action.micro)

    @abstractmethod
    def _forward(self, micro: int) -> None:
        """Run a micro-batch forward: receive its inputs from other stages, compute, send its outputs."""

    @abstractmethod
    def _backward(self, micro: int) -> None:
        """Run a micro-batch backward: receive output gradients, compute, send input gradients."""

    def _send(self, way: str, stage: int, micro: int, value: Value, name: str = "") -> None:
        """Send a value to another stage.

        Args:
            way: `forward` or `back`.
            stage: Index of the stage that needs the value.
            value: Value to send. The caller must not change it afterwards.
            name: Name of the value, if a stage needs several of a micro-batch.
        """
        process = self._place.runner(stage, micro)
        self._far().send(process, self._tag(way, micro, name), self._pack(value))

    def _receive(self, way: str, stage: int, micro: int, name: str = "") -> Value:
        """Wait for a value that another stage sends to this one. The arguments are those of `_send`."""
        process = self._place.runner(stage, micro)
        value: Value = self._unpack(self._far().receive(process, self._tag(way, micro, name)))
        return value

    def _exchange(
        self, purpose: str, tellers: Sequence[int], own_arrays: Sequence[Array]
    ) -> list[Sequence[Array]]:
        """Exchange arrays within the worker by `exchange`, with the step's number in the tag."""
        return exchange(self._place, self._links, f"{self._number}/{purpose}", tellers, own_arrays)

    def _tag(self, way: str, micro: int, name: str) -> str:
        return f"{self._number}/{way}/{micro}/{name}"

    def _far(self) -> Links:
        assert self._links is not None, "a single process has no links"
        return self._links
