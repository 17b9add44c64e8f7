"""What a stream waits for, in which order, and what a later incarnation of a worker passes over."""

from typing import Any

import pytest

from psfleet.core.base.errors import ServerUnavailable
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.shard.events import Leave, MarkCut
from psfleet_worker.session.instructions import (
    AwaitMarking,
    AwaitPushes,
    AwaitReads,
    CollectiveResult,
    CutStream,
    Instruction,
    JoinCollective,
    LayOutPush,
    Program,
    ReportState,
    SeatGranted,
    SendPull,
    SendPush,
    ServerJoined,
)
from psfleet_worker.session.worker_session import WINDOW, Session, Stream


class Reply:
    """The answer to a pull."""

    view = 7


def stream_in(mode: Mode) -> tuple[Session, Stream]:
    """The stream of a first incarnation."""
    session = Session(0, find_mode(mode))
    stream = Stream(session)
    stream.begin()
    return session, stream


def asked(program: Program[Any], *replies: object) -> list[Instruction]:
    """All that a program asks for; with these replies, or else with usual ones."""
    instructions: list[Instruction] = []
    reply: Any = None
    given = iter(replies)
    while True:
        try:
            instructions.append(program.send(reply))
        except StopIteration:
            return instructions
        match instructions[-1]:
            case AwaitMarking():
                usual: Any = (True, 0)
            case SendPull():
                usual = Reply()
            case LayOutPush():
                usual = (True, True)
            case _:
                usual = None if replies else 0
        reply = next(given, usual)


def sent(number: int, cut: tuple[int, int], lingers: bool, behind: bool) -> SendPush:
    """The push of this number to both servers, after the one before. A round's may not wait."""
    last = number - 1
    return SendPush(number, cut, lingers, not lingers, behind, (last, last), (number, number))


def test_where_one_server_holds_all_a_push_waits_for_the_pull_that_commits_it() -> None:
    """Sync, one server: what that holds every server holds, so the push may come with its commit."""
    _, stream = stream_in("sync")
    push = stream.push()
    assert next(push) == LayOutPush(1, 1)
    assert push.send((True,)) == SendPush(1, (0, 0), True, True, False, (0,), (1,))
    with pytest.raises(StopIteration):
        push.send(None)
    assert asked(stream.pull()) == [AwaitPushes(), SendPull(commit=1), AwaitPushes()]


def test_one_push_may_overtake_what_is_read_ahead() -> None:
    """Async: a second one waits for the answers."""
    _, stream = stream_in("async")
    assert asked(stream.pull_ahead()) == [SendPull(ahead=True)]
    assert asked(stream.push())[-1] == sent(1, (0, 0), True, True)
    assert asked(stream.push())[0] == AwaitReads(joined=True)
    assert asked(stream.push())[0] == AwaitPushes(WINDOW - 1)


def test_a_push_that_does_not_fit_gets_no_number() -> None:
    """The next one has it."""
    session, stream = stream_in("async")
    program = stream.push()
    assert next(program) == LayOutPush(1, 1)
    with pytest.raises(ServerUnavailable):
        program.throw(ServerUnavailable("no"))
    assert (session.sequence, session.clock) == (0, 0)
    assert asked(stream.push())[-1] == sent(1, (0, 0), True, False)


def test_pushes_carry_the_cut_that_was_made_before_them() -> None:
    """A snapshot that is asked for while a push is under way comes after it."""
    _, stream = stream_in("async")
    push = stream.push()
    next(push)
    push.send((True, True))  # it has its number, and is being sent
    assert stream.hears(5)
    assert not stream.hears(5)
    assert asked(stream.mark(5)) == [
        AwaitMarking(5),
        CutStream(MarkCut(5, 0, 0, 1), (1, 1)),
        ReportState(5, 1),
    ]
    push.close()
    assert asked(stream.push())[-1] == sent(1, (5, 1), True, False)


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
    third = [Leave(0, 2, 4, rest=3), JoinCollective(3, "", None, 2)]
    assert asked(session.meet(), None, released) == third
