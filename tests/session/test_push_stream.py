"""What a stream waits for, in which order."""

from typing import Any

import pytest

from psfleet.core.base.errors import ServerUnavailable
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.shard.events import MarkCut
from psfleet_worker.session.instructions import (
    AwaitMarking,
    AwaitPushes,
    AwaitReads,
    CutStream,
    Instruction,
    LayOutPush,
    Program,
    ReportState,
    SendPull,
    SendPush,
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


def wanted(program: Program[Any]) -> list[Instruction]:
    """All that a program asks for."""
    instructions: list[Instruction] = []
    outcome: Any = None
    while True:
        try:
            instructions.append(program.send(outcome))
        except StopIteration:
            return instructions
        marks = isinstance(instructions[-1], AwaitMarking)
        outcome = Reply() if isinstance(instructions[-1], SendPull) else (True, 0) if marks else 0
        if isinstance(instructions[-1], LayOutPush):
            outcome = (True, True)


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
    assert wanted(stream.pull()) == [AwaitPushes(), SendPull(commit=1), AwaitPushes()]


def test_one_push_may_overtake_what_is_read_ahead() -> None:
    """Async: a second one waits for the answers."""
    _, stream = stream_in("async")
    assert wanted(stream.pull_ahead()) == [SendPull(ahead=True)]
    assert wanted(stream.push())[-1] == sent(1, (0, 0), True, True)
    assert wanted(stream.push())[0] == AwaitReads(joined=True)
    assert wanted(stream.push())[0] == AwaitPushes(WINDOW - 1)


def test_a_push_that_does_not_fit_gets_no_number() -> None:
    """The next one has it."""
    session, stream = stream_in("async")
    program = stream.push()
    assert next(program) == LayOutPush(1, 1)
    with pytest.raises(ServerUnavailable):
        program.throw(ServerUnavailable("no"))
    assert (session.sequence, session.clock) == (0, 0)
    assert wanted(stream.push())[-1] == sent(1, (0, 0), True, False)


def test_pushes_carry_the_cut_that_was_made_before_them() -> None:
    """A snapshot that is asked for while a push is under way comes after it."""
    _, stream = stream_in("async")
    push = stream.push()
    next(push)
    push.send((True, True))  # it has its number, and is being sent
    assert stream.hears(5)
    assert not stream.hears(5)
    assert wanted(stream.mark(5)) == [
        AwaitMarking(5),
        CutStream(MarkCut(5, 0, 0, 1), (1, 1)),
        ReportState(5, 1),
    ]
    push.close()
    assert wanted(stream.push())[-1] == sent(1, (5, 1), True, False)
