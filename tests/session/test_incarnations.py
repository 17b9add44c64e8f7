"""What a later incarnation of a worker does again, and what it passes over."""

from typing import Any

from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.shard.events import Leave
from psfleet_worker.session.instructions import (
    CollectiveResult,
    Instruction,
    JoinCollective,
    Program,
    SeatGranted,
    ServerJoined,
)
from psfleet_worker.session.worker_session import Session


def asked(program: Program[Any], *replies: object) -> list[Instruction]:
    """All that a program asks for, with these replies."""
    instructions: list[Instruction] = []
    reply: Any = None
    rest = iter(replies)
    while True:
        try:
            instructions.append(program.send(reply))
        except StopIteration:
            return instructions
        reply = next(rest, None)


def test_what_was_over_is_passed_over() -> None:
    """A script comes to two collectives once more, of which the first has changed the mode. The mode stays,
    and nobody is told that the worker rests, until it comes to the third, which is not over."""
    sync, released = find_mode("sync"), CollectiveResult()
    session = Session(0, find_mode("async"))
    seat = SeatGranted(2, 5, 1, completed=2, switches=1, mode=sync, last=4)
    asked(session.start(), seat, [ServerJoined(4, 0, sync, 1)])
    assert asked(session.meet("switch"), released) == [JoinCollective(1, "switch", None, 1)]
    assert asked(session.change_mode(sync, 4)) == []
    assert asked(session.meet(), released) == [JoinCollective(2, "", None, 2)]
    assert asked(session.meet(), None, released) == [
        Leave(0, 2, 4, rest=3),
        JoinCollective(3, "", None, 2),
    ]
