"""The state machine of a job, without a process: every path from the first start to the end."""

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.job_events import (
    Action,
    Asked,
    Event,
    Exited,
    Finish,
    Lost,
    Ready,
    Send,
    Start,
    Tick,
    Wordless,
    causes_first,
)
from psfleet_launch.supervision.supervisor import Phase, Supervisor, Timeouts

S0, S1 = Member("server", 0), Member("server", 1)
W0, W1 = Member("worker", 0), Member("worker", 1)
TIMEOUTS = Timeouts(start=10, leave=5, grace=4)


def begun() -> Supervisor:
    """Two servers started, two workers to come."""
    job = Supervisor((S0, S1), (W0, W1), TIMEOUTS)
    assert job.begin(at=0) == [Start((S0, S1))]
    return job


def training() -> Supervisor:
    """A job under way."""
    job = begun()
    told(job, Ready(S0), Ready(S1))
    assert job.phase is Phase.TRAINING
    return job


def told(job: Supervisor, *events: Event, at: float = 1) -> list[Action]:
    """The actions after these events; the state is checked after each."""
    actions = []
    for event in events:
        actions += job.handle(event, at)
        job.validate()
    return actions


def test_workers_start_when_all_servers_are_ready() -> None:
    """The last server's readiness starts the workers, all at once."""
    job = begun()
    assert told(job, Ready(S1)) == []
    assert told(job, Ready(S0)) == [Start((W0, W1))]


def test_success() -> None:
    """Workers end, then servers by themselves: exit code 0 and nobody was signalled."""
    job = training()
    ends = (Exited(W1, 0, left=True), Exited(W0, 0, left=True), Exited(S0, 0), Exited(S1, 0))
    assert told(job, *ends) == [Finish(0)]
    assert not job.stopped


def test_servers_may_leave_before_a_worker_ends() -> None:
    """A worker that has left the fleet may go on by itself, with no server left."""
    job = training()
    assert told(job, Exited(W1, 0, left=True), Exited(S0, 0), Exited(S1, 0)) == []
    assert told(job, Exited(W0, 0)) == [Finish(0)]


def test_a_worker_that_ends_without_a_word() -> None:
    """It may be waited for, which nobody else could know; the last one keeps nobody waiting."""
    job = training()
    assert told(job, Exited(W1, 0)) == [Wordless(W1)]
    assert told(job, Exited(W0, 0), Exited(S0, 0), Exited(S1, 0)) == [Finish(0)]


def test_servers_that_stay_are_asked_then_killed() -> None:
    """After the last worker servers have `leave` seconds, then `grace` more; still a success."""
    job = training()
    told(job, Exited(W0, 0), Exited(W1, 0), at=20)
    assert told(job, Tick(), at=24.9) == []
    assert told(job, Tick(), at=25) == [Send((S0, S1), signal.SIGTERM)]
    assert told(job, Exited(S0, -15), Tick(), at=28) == []
    assert told(job, Tick(), at=29) == [Send((S1,), signal.SIGKILL)]
    assert told(job, Exited(S1, -9), at=29) == [Finish(0)]


def test_the_first_failure_counts() -> None:
    """Later exits, caused by the stop, change neither the failure nor the exit code."""
    job = training()
    assert told(job, Exited(W1, 7)) == [Send((W0,), signal.SIGTERM)]
    assert told(job, Exited(W0, -15)) == [Send((S0, S1), signal.SIGTERM)]
    assert told(job, Exited(S0, 0), Exited(S1, 1)) == [Finish(7)]
    assert job.failure is not None
    assert job.failure.member == W1
    assert not job.killed


def test_a_signal_becomes_128_and_its_number() -> None:
    """A server killed by SIGKILL ends the job with 137."""
    job = training()
    told(job, Exited(S1, -9), Exited(W0, 1), Exited(W1, 1))
    assert told(job, Exited(S0, 0)) == [Finish(137)]


def test_a_server_that_ends_early_has_failed() -> None:
    """Exit code 0 before a server is ready is a failure with exit code 1."""
    job = begun()
    assert told(job, Exited(S0, 0)) == [Send((S1,), signal.SIGTERM)]
    assert told(job, Exited(S1, -15)) == [Finish(1)]


def test_the_start_has_a_deadline() -> None:
    """A server that is not ready in time fails the job."""
    job = begun()
    told(job, Ready(S0))
    assert told(job, Tick(), at=10) == [Send((S0, S1), signal.SIGTERM)]
    assert job.failure is not None
    assert job.failure.member == S1
    assert told(job, Exited(S0, 0), Exited(S1, -15)) == [Finish(1)]


def test_workers_that_do_not_stop_are_killed_and_servers_asked() -> None:
    """The grace period of the workers ends before that of the servers begins."""
    job = training()
    told(job, Exited(S0, 1), at=5)
    assert told(job, Tick(), at=9) == [Send((W0, W1), signal.SIGKILL), Send((S1,), signal.SIGTERM)]
    told(job, Exited(W0, -9), Exited(W1, -9), at=9)
    assert told(job, Tick(), at=13) == [Send((S1,), signal.SIGKILL)]
    assert told(job, Exited(S1, -9), at=13) == [Finish(1)]
    assert job.killed == {W0, W1, S1}


def test_an_interrupt_is_passed_on_and_a_second_kills() -> None:
    """Workers get the very signal; the second one means now; the exit code is 130."""
    job = training()
    assert told(job, Asked(signal.SIGINT)) == [Send((W0, W1), signal.SIGINT)]
    assert told(job, Asked(signal.SIGINT)) == [Send((S0, S1, W0, W1), signal.SIGKILL)]
    assert told(job, *(Exited(member, -9) for member in (W0, W1, S0, S1))) == [Finish(130)]


def test_causes_come_first() -> None:
    """Of exits seen at once, one by a signal comes first, then a server's, then a worker's."""
    seen = [Exited(W0, 0), Exited(W1, 1), Exited(S1, 1), Exited(W0, -9)]
    assert causes_first(seen) == [Exited(W0, -9), Exited(S1, 1), Exited(W1, 1), Exited(W0, 0)]


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
        doomed = {m for a in actions if isinstance(a, Send) for m in a.members} & job.alive
        events: list[Event] = [Exited(member, -15) for member in sorted(doomed)]
        for event in [*events, Tick(), Asked(signal.SIGINT)]:
            actions += job.handle(event, now)
            job.validate()
    assert job.phase is Phase.DONE
    assert sum(isinstance(action, Finish) for action in actions) == 1
    assert isinstance(actions[-1], Finish)


def _moment(job: Supervisor, kind: str, index: int, code: int) -> Event:
    """An event that can happen in this state, as like as possible to the wanted one."""
    alive, awaited = sorted(job.alive), sorted(job.awaited)
    if kind == "exit" and alive:
        return Exited(alive[index % len(alive)], code)
    if kind == "ready" and awaited:
        return Ready(awaited[index % len(awaited)])
    return Asked(signal.SIGINT) if kind == "ask" else Tick()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_asked_before_ready(number: int) -> None:
    """Before there are workers a signal stops the servers."""
    job = begun()
    assert told(job, Asked(number)) == [Send((S0, S1), signal.SIGTERM)]
    assert told(job, Exited(S0, 0), Exited(S1, 0)) == [Finish(128 + number)]


def test_a_server_with_a_log_is_started_again() -> None:
    """So often as it may be; the next death is the job's failure, as is one before the training."""
    job = Supervisor((S0, S1), (W0, W1), TIMEOUTS, restarts=2)
    job.begin(at=0)
    told(job, Ready(S0), Ready(S1))
    assert told(job, Exited(S1, -9), Exited(S1, 3)) == [Start((S1,)), Start((S1,))]
    assert told(job, Exited(S0, -9)) == [Start((S0,))]
    assert told(job, Exited(S1, -9)) == [Send((W0, W1), signal.SIGTERM)]
    assert job.failure is not None
    assert job.failure.member == S1
    early = Supervisor((S0, S1), (W0, W1), TIMEOUTS, restarts=2)
    early.begin(at=0)
    told(early, Exited(S0, 1))
    assert early.failure is not None


def test_a_server_with_a_log_that_is_killed_when_all_is_done() -> None:
    """Its workers have ended well and its log has all that they pushed: the job has succeeded."""
    job = Supervisor((S0, S1), (W0, W1), TIMEOUTS, restarts=2)
    job.begin(at=0)
    told(job, Ready(S0), Ready(S1), Exited(W0, 0, left=True), Exited(W1, 0, left=True))
    assert told(job, Exited(S0, -9), Exited(S1, 0)) == [Finish(0)]


def test_a_worker_is_started_again() -> None:
    """So often as it may be; then its death is the job's failure."""
    job = Supervisor((S0, S1), (W0, W1), TIMEOUTS, worker_restarts=1)
    job.begin(at=0)
    told(job, Ready(S0), Ready(S1))
    assert told(job, Exited(W1, -9)) == [Start((W1,))]
    assert told(job, Exited(W1, 1)) == [Send((W0,), signal.SIGTERM)]
    assert job.failure is not None
    assert job.failure.member == W1


def test_a_worker_that_has_left_is_done() -> None:
    """Killed after its last word it is not started again, for nobody would know it any more."""
    job = Supervisor((S0, S1), (W0, W1), TIMEOUTS, worker_restarts=1)
    job.begin(at=0)
    told(job, Ready(S0), Ready(S1))
    assert told(job, Exited(W1, -9, left=True)) == [Lost(W1, -9, left=True)]
    told(job, Exited(S0, 0), Exited(S1, 0))
    assert told(job, Exited(W0, -9, left=True)) == [Lost(W0, -9, left=True), Finish(0)]


def test_a_script_that_fails_after_it_has_left_fails_the_job() -> None:
    """At once: another process would not find its seat. So does one that is killed by surprise."""
    for code, restarts in ((3, 1), (-9, 0)):
        job = Supervisor((S0, S1), (W0, W1), TIMEOUTS, worker_restarts=restarts)
        job.begin(at=0)
        told(job, Ready(S0), Ready(S1))
        assert told(job, Exited(W1, code, left=True)) == [Send((W0,), signal.SIGTERM)]
        assert job.failure is not None


def test_a_worker_that_came_back_too_late_is_done() -> None:
    """It was killed while its last word was answered; servers end when every worker has left."""
    job = Supervisor((S0, S1), (W0, W1), TIMEOUTS, worker_restarts=1)
    job.begin(at=0)
    told(job, Ready(S0), Ready(S1))
    assert told(job, Exited(W1, -9)) == [Start((W1,))]
    assert told(job, Exited(W0, 0, left=True), Exited(S0, 0), Exited(S1, 0)) == []
    assert told(job, Exited(W1, 1)) == [Lost(W1, 1, left=True), Finish(0)]


def test_a_worker_that_dies_between_its_last_words_is_done() -> None:
    """A server has ended, so every worker has told it that it leaves; the other servers are asked to end."""
    for before in (
        (),
        (Exited(W1, -9),),
    ):  # also if it was killed, and started again, a moment before
        job = Supervisor((S0, S1), (W0, W1), TIMEOUTS, worker_restarts=1)
        job.begin(at=0)
        told(job, Ready(S0), Ready(S1), *before)
        told(job, Exited(W0, 0, left=True), Exited(S1, 0))
        assert told(job, Exited(W1, 1 if before else -9)) == [
            Lost(W1, 1 if before else -9, left=True)
        ]
        assert job.phase is Phase.LEAVING
        assert job.handle(Tick(), 100) == [Send((S0,), signal.SIGTERM)]
        assert told(job, Exited(S0, 0)) == [Finish(0)]


def test_a_job_goes_on_without_a_worker() -> None:
    """As long as another one trains."""
    job = Supervisor((S0, S1), (W0, W1), TIMEOUTS, spares_workers=True)
    job.begin(at=0)
    told(job, Ready(S0), Ready(S1))
    assert told(job, Exited(W1, -9)) == [Lost(W1, -9)]
    assert job.failure is None
    assert told(job, Exited(W0, 1)) == [Send((S0, S1), signal.SIGTERM)]
    assert job.failure is not None
    assert job.failure.member == W0
