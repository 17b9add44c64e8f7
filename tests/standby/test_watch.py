"""Who is given up for silence, without a process."""

import os
import threading
from typing import Any

import pytest

from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.job_events import (
    Action,
    ClockTick,
    Event,
    KillHung,
    LivenessSignal,
    ProcessEnding,
    ProcessExited,
    ReportHung,
    ServerReady,
    StartProcesses,
)
from psfleet_launch.supervision.standbys import (
    HangDetector,
    PromoteStandby,
    ReleaseStandbys,
    Standbys,
)
from psfleet_launch.supervision.supervisor import Supervisor
from psfleet_server.engine.periodic_threads import LivenessPipe
from tests.waiting import until

SERVER = Member("server", 0)
FIRST, SECOND = Member("server", 0, copy=1), Member("server", 0, copy=2)
WORKER = Member("worker", 0)
PATIENCE = 3.0
LOOK = 0.25


class Job:
    """A job of one server, its standby and one worker that trains; time goes on in looks."""

    def __init__(self, *, ready: bool = True, supervisor: Supervisor | None = None) -> None:
        self.at = 0.0
        self.supervisor = supervisor or Supervisor(
            (SERVER,), (WORKER,), standbys=Standbys(), watch=HangDetector(PATIENCE)
        )
        self.supervisor.begin(self.at)
        self.supervisor.handle(ServerReady(SERVER), self.at)
        self.look({SERVER, FIRST}, 1.0)
        if ready:
            self.supervisor.handle(ServerReady(FIRST), self.at)

    def look(self, living: set[Member], seconds: float, step: float = LOOK) -> list[Action]:
        """All that is done while only these give liveness signals."""
        actions: list[Action] = []
        for _ in range(round(seconds / step)):
            self.at += step
            events: list[Event] = [*map(LivenessSignal, sorted(living)), ClockTick()]
            for event in events:
                actions += self.supervisor.handle(event, self.at)
                self.supervisor.validate()
        return actions


def test_a_silent_server_is_given_up_and_replaced() -> None:
    """Once, after the stated time and not before; when it is dead its standby takes over."""
    job = Job()
    assert job.look({FIRST}, PATIENCE) == []
    assert job.look({FIRST}, PATIENCE) == [KillHung(SERVER, PATIENCE)]
    assert job.supervisor.handle(ProcessExited(SERVER, -9), job.at) == [
        PromoteStandby(FIRST, SERVER, 2)
    ]
    job.supervisor.handle(ServerReady(FIRST), job.at)
    assert job.look({FIRST}, 3 * PATIENCE) == []


@pytest.mark.parametrize("ready", [True, False])
def test_a_silent_standby_is_given_up_and_replaced(ready: bool) -> None:
    """Also one that has not got its copy yet: its server is released from it when it is dead."""
    job = Job(ready=ready)
    assert job.look({SERVER}, 2 * PATIENCE) == [KillHung(FIRST, PATIENCE)]
    assert job.supervisor.handle(ProcessExited(FIRST, -9), job.at) == [
        ReleaseStandbys(SERVER, 1),
        StartProcesses((SECOND,)),
    ]


def test_a_server_without_a_ready_standby_is_left_alone() -> None:
    """It may wake, and only it has what it told."""
    job = Job(ready=False)
    assert job.look({FIRST}, 4 * PATIENCE) == []


@pytest.mark.parametrize("first", [SERVER, FIRST])
def test_of_two_silent_ones_the_one_that_wakes_goes_on(first: Member) -> None:
    """Until then neither is given up: both have all that anybody was told, whichever wakes."""
    job = Job()
    assert job.look(set(), 4 * PATIENCE) == []
    (other,) = {SERVER, FIRST} - {first}
    assert job.look({first}, LOOK) == [KillHung(other, PATIENCE)]


def test_a_standby_that_fell_silent_just_after_its_server_does_not_take_over() -> None:
    """It has to be heard after its server was silent for the whole time."""
    job = Job()
    job.look({FIRST}, PATIENCE - LOOK)
    assert job.look(set(), 4 * PATIENCE) == []


def test_a_server_with_a_log_is_given_up_and_started_again() -> None:
    """As often as a server that dies; after that its silence is only told."""
    alone = Supervisor(
        (SERVER,), (WORKER,), restarts=1, watch=HangDetector(PATIENCE), restarts_hung=True
    )
    job = Job(ready=False, supervisor=alone)
    assert job.look(set(), PATIENCE) == []
    assert job.look(set(), PATIENCE) == [KillHung(SERVER, PATIENCE)]
    assert alone.handle(ProcessExited(SERVER, -9), job.at) == [StartProcesses((SERVER,))]
    assert job.look(set(), 3 * PATIENCE) == []  # it is starting
    job.look({SERVER}, 1.0)
    assert job.look(set(), 3 * PATIENCE) == [ReportHung(SERVER, PATIENCE)]


def test_a_server_without_a_log_is_never_given_up() -> None:
    """Each of its silences is told once; a launcher that was asleep itself tells of none."""
    alone = Supervisor((SERVER,), (WORKER,), watch=HangDetector(PATIENCE))
    job = Job(ready=False, supervisor=alone)
    for _ in range(2):
        assert job.look(set(), 3 * PATIENCE) == [ReportHung(SERVER, PATIENCE)]
        assert job.look({SERVER}, 1.0) == []
    job.at += 3600
    assert job.look({SERVER}, 1.0) == []


def test_nobody_is_silent_while_the_launcher_sleeps() -> None:
    """All was stopped for an hour and goes on: the first look gives up nobody."""
    job = Job()
    job.at += 3600
    assert job.supervisor.handle(ClockTick(), job.at) == []
    assert job.look({SERVER, FIRST}, 1.0) == []
    job.at += 3600
    assert job.supervisor.handle(LivenessSignal(FIRST), job.at) == []
    assert job.supervisor.handle(ClockTick(), job.at) == []


def test_liveness_signals_come_until_nobody_listens() -> None:
    """A byte at once and then others; the thread ends when the pipe's other end is closed."""
    ours, theirs = os.pipe()
    with LivenessPipe(theirs):
        assert os.read(ours, 1) + os.read(ours, 1) == b"\0\0"
        os.close(ours)
        until(lambda: all(thread.name != "liveness" for thread in threading.enumerate()))


def test_who_ends_closes_the_pipe() -> None:
    """The last liveness signal is the pipe's end, with no thread left."""
    ours, theirs = os.pipe()
    with LivenessPipe(theirs):
        assert os.read(ours, 1) == b"\0"
    while os.read(ours, 64):
        pass
    os.close(ours)
    assert not any(thread.name == "liveness" for thread in threading.enumerate())


@pytest.mark.parametrize("restarts_hung", [False, True])
def test_who_is_about_to_end_is_not_silent(restarts_hung: bool) -> None:
    """However long the kernel takes: a server is neither told of nor killed while it ends."""
    how: dict[str, Any] = {"restarts": 5, "restarts_hung": restarts_hung}
    job = Job(supervisor=Supervisor((SERVER,), (WORKER,), watch=HangDetector(PATIENCE), **how))
    assert job.supervisor.handle(ProcessEnding(SERVER), job.at) == []
    assert job.look(set(), 3 * PATIENCE) == []
