"""A standby: takes its primary's records through the code that replays a log, until it is to take over."""

from collections.abc import Callable
from typing import Any

from psfleet_server.durability.recovery import take
from tests.protocol.fleet.calls import Follow, Part, Promote, Took
from tests.protocol.fleet.job import Job
from tests.protocol.fleet.kept import Start
from tests.protocol.fleet.moved import Moved
from tests.protocol.fleet.server import Server
from tests.protocol.scheduler import Append, Boot, Disk, Instruction, Received, Send, Store, Tick


class Standby(Server):
    """A process that follows the primary of its place, and later is that.

    Attributes:
        attach: Its number.
        is_ready: Its primary requires it: it may take over.
    """

    def __init__(
        self,
        index: int,
        job: Job,
        boot: int,
        attach: int,
        start: Callable[[], Start | None] = lambda: None,
    ) -> None:
        super().__init__(index, job, Disk(), boot)
        self._start = start
        self.attach = attach
        self.is_ready = False
        self._index = index
        self._leads = False
        self._waiting: dict[int, Part] = {}
        self._place = 0
        self._number = 0

    def handle(self, event: Any) -> list[Instruction]:
        if self._leads:
            return super().handle(event)
        self.out = []
        match event:
            case Promote():
                self._leads = True
                if (start := self._start()) is not None:
                    self.moved = Moved(self, start)
                return super().handle(Boot())
            case Tick() if not self._place:
                self.out.append(Send(f"S{self._index}", Follow(self.attach, self.job.servers)))
            case Received(source, Part() as part) if part.attach == self.attach:
                self._take(source, part)
        return self.out

    def _take(self, source: str, part: Part) -> None:
        if part.place > self._place:
            self._waiting[part.place] = part
        while (following := self._waiting.pop(self._place + 1, None)) is not None:
            self._place += 1
            self._take_next(following)
        self.out.append(Send(source, Took(self.attach, self._place, self._number)))

    def _take_next(self, part: Part) -> None:
        if not part.kind:
            self.is_ready = True
            self._number = max(self._number, part.number)
            return
        take(part.kind, memoryview(part.body), self.its_shard, self.coordinator)
        self._number = max(self._number, part.number)
        record = part.record
        if isinstance(record, list):  # the end of the copy
            self.history, record = list(record), None
            self.out.append(Store({"history": list(self.history)}))
        self.history.append(record)
        self.out.append(Append((part.kind, part.body, record)))
