"""The state machine of a job, without a process. Starts that fail and signals: test_local.py."""

import signal
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.job_events import (
    Action,
    ClockTick,
    Event,
    Failure,
    FinishJob,
    Phase,
    ProcessExited,
    ReportLostWorker,
    ReportMissingLeave,
    SendSignal,
    ServerReady,
    ServerUnreachable,
    StartProcesses,
    StopRequested,
    Timeouts,
    causes_first,
)
from psfleet_launch.supervision.supervisor import Supervisor

S0, S1 = Member("server", 0), Member("server", 1)
W0, W1 = Member("worker", 0), Member("worker", 1)
TIMEOUTS = Timeouts(start=10, leave=5, grace=4)


def begun(**options: Any) -> Supervisor:
    """Two servers started, two workers to come."""
    job = Supervisor((S0, S1), (W0, W1), TIMEOUTS, **options)
    assert job.begin(at=0) == [StartProcesses((S0, S1))]
    return job


def training(**options: Any) -> Supervisor:
    """A job under way."""
    job = begun(**options)
    told(job, ServerReady(S0), ServerReady(S1))
    assert job.phase is Phase.TRAINING
    return job


def told(job: Supervisor, *events: Event, at: float = 1) -> list[Action]:
    """The actions after these events; the state is checked after each."""
    actions = []
    for event in events:
        actions += job.handle(event, at)
        job.validate()
    return actions


def failed(job: Supervisor) -> Member | None:
    """Who failed first."""
    return job.failure.member if job.failure else None


def test_servers_may_leave_before_a_worker_ends() -> None:
    """A worker that has left the fleet may go on by itself, with no server left."""
    job = training()
    assert (
        told(job, ProcessExited(W1, 0, left=True), ProcessExited(S0, 0), ProcessExited(S1, 0)) == []
    )
    assert told(job, ProcessExited(W0, 0)) == [FinishJob(0)]


def test_a_worker_that_ends_without_a_word() -> None:
    """It may be waited for, which nobody else could know; the last one keeps nobody waiting."""
    job = training()
    assert told(job, ProcessExited(W1, 0)) == [ReportMissingLeave(W1)]
    assert told(job, ProcessExited(W0, 0), ProcessExited(S0, 0), ProcessExited(S1, 0)) == [
        FinishJob(0)
    ]


def test_servers_that_stay_are_asked_then_killed() -> None:
    """After the last worker servers have `leave` seconds, then `grace` more; still a success."""
    job = training()
    told(job, ProcessExited(W0, 0), ProcessExited(W1, 0), at=20)
    assert told(job, ClockTick(), at=24.9) == []
    assert told(job, ClockTick(), at=25) == [SendSignal((S0, S1), signal.SIGTERM)]
    assert told(job, ProcessExited(S0, -15), ClockTick(), at=28) == []
    assert told(job, ClockTick(), at=29) == [SendSignal((S1,), signal.SIGKILL)]
    assert told(job, ProcessExited(S1, -9), at=29) == [FinishJob(0)]


def test_the_first_failure_counts() -> None:
    """Later exits, caused by the stop, change neither the failure nor the exit code."""
    job = training()
    assert told(job, ProcessExited(W1, 7)) == [SendSignal((W0,), signal.SIGTERM)]
    assert told(job, ProcessExited(W0, -15)) == [SendSignal((S0, S1), signal.SIGTERM)]
    assert told(job, ProcessExited(S0, 0), ProcessExited(S1, 1)) == [FinishJob(7)]
    assert failed(job) == W1
    assert not job.killed


def test_a_server_that_ends_early_has_failed() -> None:
    """Exit code 0 before a server is ready is a failure with exit code 1."""
    job = begun()
    assert told(job, ProcessExited(S0, 0)) == [SendSignal((S1,), signal.SIGTERM)]
    assert told(job, ProcessExited(S1, -15)) == [FinishJob(1)]


def test_a_server_out_of_reach_ends_the_start() -> None:
    """It failed first, and the reason is kept; in a job that trains the event has no effect."""
    job = begun()
    why = "host alpha cannot connect to server 1"
    assert told(job, ServerReady(S0), ServerUnreachable(S1, why)) == [
        SendSignal((S0, S1), signal.SIGTERM)
    ]
    assert job.failure == Failure(S1, None, why)
    assert told(training(), ServerUnreachable(S1, why)) == []


def test_workers_that_do_not_stop_are_killed_and_servers_asked() -> None:
    """The grace period of the workers ends before that of the servers begins."""
    job = training()
    told(job, ProcessExited(S0, 1), at=5)
    assert told(job, ClockTick(), at=9) == [
        SendSignal((W0, W1), signal.SIGKILL),
        SendSignal((S1,), signal.SIGTERM),
    ]
    told(job, ProcessExited(W0, -9), ProcessExited(W1, -9), at=9)
    assert told(job, ClockTick(), at=13) == [SendSignal((S1,), signal.SIGKILL)]
    assert told(job, ProcessExited(S1, -9), at=13) == [FinishJob(1)]
    assert job.killed == {W0, W1, S1}


def test_an_interrupt_is_passed_on_and_a_second_kills() -> None:
    """Workers get the very signal; the second one means now; the exit code is 130."""
    job = training()
    assert told(job, StopRequested(signal.SIGINT)) == [SendSignal((W0, W1), signal.SIGINT)]
    assert told(job, StopRequested(signal.SIGINT)) == [SendSignal((S0, S1, W0, W1), signal.SIGKILL)]
    assert told(job, *(ProcessExited(member, -9) for member in (W0, W1, S0, S1))) == [
        FinishJob(130)
    ]


def test_causes_come_first() -> None:
    """Of exits seen at once, one by a signal comes first, then a server's, then a worker's."""
    seen = [ProcessExited(W0, 0), ProcessExited(W1, 1), ProcessExited(S1, 1), ProcessExited(W0, -9)]
    assert causes_first(seen) == [
        ProcessExited(W0, -9),
        ProcessExited(S1, 1),
        ProcessExited(W1, 1),
        ProcessExited(W0, 0),
    ]


MOMENTS = st.lists(
    st.tuples(
        st.sampled_from(["ready", "exit", "ask", "wait"]),
        st.integers(0, 3),
        st.sampled_from([0, 0, 0, 1, -9]),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(MOMENTS)
def test_every_job_ends(moments: list[tuple[str, int, int]]) -> None:
    """Whatever happens: once processes obey signals and time passes, the job ends once."""
    job = Supervisor((S0, S1), (W0, W1), TIMEOUTS)
    actions = job.begin(at=0)
    now = 0.0
    for kind, index, code in moments:
        now += 1
        actions += job.handle(_moment(job, kind, index, code), now)
        job.validate()
    for _ in range(50):
        now += 5
        doomed = {m for a in actions if isinstance(a, SendSignal) for m in a.members} & job.alive
        events: list[Event] = [ProcessExited(member, -15) for member in sorted(doomed)]
        for event in [*events, ClockTick(), StopRequested(signal.SIGINT)]:
            actions += job.handle(event, now)
            job.validate()
    assert job.phase is Phase.DONE
    assert sum(isinstance(action, FinishJob) for action in actions) == 1
    assert isinstance(actions[-1], FinishJob)


def _moment(job: Supervisor, kind: str, index: int, code: int) -> Event:
    """An event that can happen in this state, as like as possible to the wanted one."""
    alive, awaited = sorted(job.alive), sorted(job.awaited)
    if kind == "exit" and alive:
        return ProcessExited(alive[index % len(alive)], code)
    if kind == "ready" and awaited:
        return ServerReady(awaited[index % len(awaited)])
    return StopRequested(signal.SIGINT) if kind == "ask" else ClockTick()


def test_a_server_with_a_log_is_started_again() -> None:
    """So often as it may be; the next death is the job's failure, as is one before the training."""
    job = training(restarts=2)
    assert told(job, ProcessExited(S1, -9), ProcessExited(S1, 3)) == [
        StartProcesses((S1,)),
        StartProcesses((S1,)),
    ]
    assert told(job, ProcessExited(S0, -9)) == [StartProcesses((S0,))]
    assert told(job, ProcessExited(S1, -9)) == [SendSignal((W0, W1), signal.SIGTERM)]
    assert failed(job) == S1
    early = begun(restarts=2)
    told(early, ProcessExited(S0, 1))
    assert early.failure is not None


def test_a_server_with_a_log_that_is_killed_when_all_is_done() -> None:
    """Its workers have ended well and its log has all that they pushed: the job has succeeded."""
    job = training(restarts=2)
    told(job, ProcessExited(W0, 0, left=True), ProcessExited(W1, 0, left=True))
    assert told(job, ProcessExited(S0, -9), ProcessExited(S1, 0)) == [FinishJob(0)]


def test_a_worker_is_started_again() -> None:
    """So often as it may be; then its death is the job's failure."""
    job = training(worker_restarts=1)
    assert told(job, ProcessExited(W1, -9)) == [StartProcesses((W1,))]
    assert told(job, ProcessExited(W1, 1)) == [SendSignal((W0,), signal.SIGTERM)]
    assert failed(job) == W1


def test_a_worker_that_has_left_is_done() -> None:
    """Killed after its last word it is not started again, for nobody would know it any more."""
    job = training(worker_restarts=1)
    assert told(job, ProcessExited(W1, -9, left=True)) == [ReportLostWorker(W1, -9, left=True)]
    told(job, ProcessExited(S0, 0), ProcessExited(S1, 0))
    assert told(job, ProcessExited(W0, -9, left=True)) == [
        ReportLostWorker(W0, -9, left=True),
        FinishJob(0),
    ]


def test_a_script_that_fails_after_it_has_left_fails_the_job() -> None:
    """At once: another process would not find its seat. So does one that is killed by surprise."""
    for code, restarts in ((3, 1), (-9, 0)):
        job = training(worker_restarts=restarts)
        assert told(job, ProcessExited(W1, code, left=True)) == [SendSignal((W0,), signal.SIGTERM)]
        assert job.failure is not None


def test_a_worker_that_came_back_too_late_is_done() -> None:
    """It was killed while its last word was answered; servers end when every worker has left."""
    job = training(worker_restarts=1)
    assert told(job, ProcessExited(W1, -9)) == [StartProcesses((W1,))]
    assert (
        told(job, ProcessExited(W0, 0, left=True), ProcessExited(S0, 0), ProcessExited(S1, 0)) == []
    )
    assert told(job, ProcessExited(W1, 1)) == [ReportLostWorker(W1, 1, left=True), FinishJob(0)]


def test_a_worker_that_dies_between_its_last_words_is_done() -> None:
    """A server has ended, so every worker has told it that it leaves; the other servers are asked to end."""
    # Also if it was killed, and started again, a moment before.
    for before in ((), (ProcessExited(W1, -9),)):
        job = training(worker_restarts=1)
        told(job, *before)
        told(job, ProcessExited(W0, 0, left=True), ProcessExited(S1, 0))
        assert told(job, ProcessExited(W1, 1 if before else -9)) == [
            ReportLostWorker(W1, 1 if before else -9, left=True)
        ]
        assert job.phase is Phase.LEAVING
        assert job.handle(ClockTick(), 100) == [SendSignal((S0,), signal.SIGTERM)]
        assert told(job, ProcessExited(S0, 0)) == [FinishJob(0)]


def test_a_job_goes_on_without_a_worker() -> None:
    """As long as another one trains."""
    job = training(spares_workers=True)
    assert told(job, ProcessExited(W1, -9)) == [ReportLostWorker(W1, -9)]
    assert job.failure is None
    assert told(job, ProcessExited(W0, 1)) == [SendSignal((S0, S1), signal.SIGTERM)]
    assert failed(job) == W0
