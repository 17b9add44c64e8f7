"""Links between stages, and the position of this process among them."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from psfleet.errors import ConfigError

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
