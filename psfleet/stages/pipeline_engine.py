"""One step of a pipeline, as one process of a worker takes it. Programs and torch models share it.

The engine takes this process's part of the schedule in order, and brings values and gradients from
chunk to chunk. A subclass says how a chunk runs forward and backward, and how a value travels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from psfleet.stages.links import Links, StagePosition, exchange
from psfleet.stages.schedule import Action, Schedule, Work

__all__ = ["PipelineEngine"]

Array = NDArray[Any]
Value = TypeVar("Value")


class PipelineEngine(ABC, Generic[Value]):
    """One step. A subclass has functions for what chunks give each other:

    - `_settled`: The value as another chunk gets it: in the same process the same bits as elsewhere.
    - `_pack`: A settled value as a message.
    - `_unpack`: What was packed.

    Args:
        schedule: Of all stages.
        sizes: Samples of each micro-batch.
        place: Which stage this is.
        links: To the other processes; None if there are none.
        number: Of the step: the same in all stages, never the same twice.
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
        self._shares = [size / sum(sizes) for size in sizes]
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
        """What each of these processes tells all of them; `mine` is what this one does, if it is one."""
        return exchange(self._place, self._links, f"{self._number}/{what}", tellers, mine)

    def _runner(self, chunk: int, micro: int) -> int:
        return self._place.runner(self._schedule.stage_of(chunk), micro)

    def _tag(self, way: str, chunk: int, micro: int, name: str) -> str:
        return f"{self._number}/{way}/{micro}/{chunk}/{name}"

    def _far(self) -> Links:
        assert self._links is not None, "a single process has nobody to talk to"
        return self._links
