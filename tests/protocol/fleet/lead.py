"""Who leads snapshots: one after the other, in the order of calls of psfleet_server.snapshots.lead.

A snapshot that does not come to its end is given up, and the next one has a higher number.
"""

from typing import Any

from psfleet.errors import PsfleetError
from psfleet.shard.events import BeginCut, EndCut
from psfleet.shard.snapshot_cuts import Cutting
from tests.protocol.fleet.calls import Begun, Finish, Mark, Request, Response, Taken
from tests.protocol.fleet.job import Job
from tests.protocol.scheduler import Boot, Disk, Instruction, Received, Send, Store, Tick

__all__ = ["Lead", "Snapshots"]

Snapshots = dict[int, list[Taken]]
"""Complete ones: by number the parts of all servers, in order."""

_PATIENCE = 15  # ticks until a snapshot is given up


class Lead:
    """The process that wants snapshots all the time."""

    def __init__(self, job: Job, disk: Disk, boot: int, complete: Snapshots) -> None:
        self.out: list[Instruction] = []
        self._servers = [f"S{server}" for server in range(job.servers)]
        self._complete = complete
        self._number: int = disk.fields.get("number", 0)
        self._calls = boot << 20
        self._patience = 0
        self._asked: dict[str, Request] = {}
        self._answers: dict[str, Any] = {}
        self._marks: dict[int, int] = {}

    def handle(self, event: Any) -> list[Instruction]:
        """See scheduler.Machine."""
        self.out = []
        match event:
            case Boot():
                self._next()
            case Tick():
                self._tick()
            case Received(_, Response(number, content)):
                self._answered(number, content)
        return self.out

    def _tick(self) -> None:
        self._patience -= 1
        if self._patience < 0:
            self._give_up()
            return
        self.out += [
            Send(name, request)
            for name, request in self._asked.items()
            if name not in self._answers
        ]
        self.out += [
            Send(f"w{seat}", Mark(self._number, life)) for seat, life in self._marks.items()
        ]

    def _next(self) -> None:
        """No round closes until it is known where all servers stand."""
        self._number += 1
        self._patience, self._marks = _PATIENCE, {}
        self.out.append(Store({"number": self._number}))
        self._ask(BeginCut(Cutting(self._number)))

    def _give_up(self) -> None:
        self._ask(EndCut(self._number))
        self._next()

    def _ask(self, content: Any) -> None:
        self._answers, self._asked = {}, {}
        for name in self._servers:
            self._calls += 1
            self._asked[name] = Request(self._calls, content)
            self.out.append(Send(name, self._asked[name]))

    def _answered(self, number: int, content: Any) -> None:
        name = next((name for name, asked in self._asked.items() if asked.number == number), None)
        if name is None or content is None:
            return
        if isinstance(content, PsfleetError):
            self._give_up()
            return
        self._answers[name] = content
        if len(self._answers) == len(self._servers):
            self._go_on([self._answers[name] for name in self._servers])

    def _go_on(self, answers: list[Any]) -> None:
        """All servers have answered."""
        last = self._asked[self._servers[0]].content
        if isinstance(last, Finish):
            self._complete[self._number] = answers
            self._give_up()
        elif isinstance(last, BeginCut) and last.cutting == Cutting(self._number):
            self._cut(answers)
        else:
            self._ask(Finish(self._number))

    def _cut(self, said: list[Begun]) -> None:
        """After the highest round that any server has closed, or at the marks of all lives."""
        if said[0].mode in ("", "sync"):
            self._ask(BeginCut(Cutting(self._number, round=max(each.closed for each in said))))
        elif any(each.lives != said[0].lives for each in said):
            self._ask(BeginCut(Cutting(self._number)))
        else:
            self._marks = dict(said[0].lives)
            self._ask(BeginCut(Cutting(self._number, members=dict(said[0].lives))))
