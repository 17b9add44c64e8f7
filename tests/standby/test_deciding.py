"""Who takes over, and what a primary waits for, without a process."""

import signal
import threading

import numpy as np
import pytest

from psfleet.core.base.errors import Fenced, ProtocolError
from psfleet.core.base.settings.environment import Environment
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.net.connections.access import Access
from psfleet.core.net.frame import Part
from psfleet.core.net.v1.replica_pb2 import FollowRequest
from psfleet_launch.console.screen import StandbyNotice
from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.job_events import (
    ClockTick,
    FinishJob,
    MachineCutOff,
    ProcessExited,
    SendSignal,
    ServerReady,
    StartProcesses,
)
from psfleet_launch.supervision.standbys import PromoteStandby, ReleaseStandbys, Standbys
from psfleet_launch.supervision.supervisor import Supervisor
from psfleet_server.durability.log_shipping import LogShipping, joined
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.replies import Deadlines
from psfleet_server.standby import Standby

SERVER = Member("server", 0)
FIRST, SECOND = Member("server", 0, copy=1), Member("server", 0, copy=2)
WORKER = Member("worker", 0)


class Job(Supervisor):
    """A job of one server and one worker that has standbys."""

    standbys: Standbys


def training() -> Job:
    """Such a job, which has begun to train; a standby has been started."""
    job = Job((SERVER,), (WORKER,), standbys=Standbys())
    job.begin(0.0)
    assert job.handle(ServerReady(SERVER), 1.0) == [
        StartProcesses((FIRST,)),
        StartProcesses((WORKER,)),
    ]
    return job


def test_a_ready_standby_takes_over_and_gets_one_itself() -> None:
    """The next standby is started when the takeover is over; terms rise."""
    job = training()
    assert job.handle(ServerReady(FIRST), 2.0) == []
    assert job.handle(ProcessExited(SERVER, -9), 3.0) == [PromoteStandby(FIRST, SERVER, 2)]
    assert job.standbys.promoted == {FIRST}
    assert job.handle(ServerReady(FIRST), 3.2) == [StartProcesses((SECOND,))]
    job.handle(ServerReady(SECOND), 4.0)
    assert job.handle(ProcessExited(FIRST, -9), 5.0) == [PromoteStandby(SECOND, FIRST, 3)]
    job.validate()


def test_a_standby_that_is_not_ready_does_not_take_over() -> None:
    """The server may have answered what that standby has not: the job fails as it would without, and says
    that no standby was ready."""
    job = training()
    job.handle(ProcessExited(SERVER, -9), 3.0)
    assert job.failure is not None
    assert job.failure.member == SERVER
    assert job.failure.why == "its standby, server 0 copy 1, was not ready"


def test_a_person_hears_when_all_servers_have_standbys() -> None:
    """Once they have, and again after one was lost; until then nothing is said."""
    job, notice = training(), StandbyNotice()
    assert [notice.look(job.standbys, at) for at in (1.0, 2.0)] == ["", ""]
    job.handle(ServerReady(FIRST), 4.2)
    assert notice.look(job.standbys, 4.2) == "standbys  ready in 3.2 s"
    assert notice.look(job.standbys, 5.0) == ""
    job.handle(ProcessExited(FIRST, 1), 6.0)
    assert notice.look(job.standbys, 6.0) == ""
    job.handle(ServerReady(SECOND), 7.0)
    assert notice.look(job.standbys, 7.0) == "standbys  ready again in 1.0 s"


def test_a_server_without_any_standby_says_so() -> None:
    """All that it may have had of late are lost."""
    job = training()
    job.standbys.most = 2
    for copy in (1, 2, 3):
        job.handle(ProcessExited(Member("server", 0, copy=copy), 1), 2.0)
    job.handle(ProcessExited(SERVER, 137, cause="the agent on host h1 is lost"), 3.0)
    assert job.failure is not None
    assert job.failure.why == (
        "server 0 had no standby, since 2 others were started in its place within 10 minutes"
    )


def test_standbys_that_cannot_live_are_started_less_often() -> None:
    """After 20 in 10 minutes the next one waits until the rate allows it, and the console says so. It starts
    without any other event, and protects the server as the first one did."""
    job, notice = training(), StandbyNotice()
    for copy in range(1, 21):
        following = Member("server", 0, copy=copy + 1)
        died = ProcessExited(Member("server", 0, copy=copy), 1)
        assert StartProcesses((following,)) in job.handle(died, 10.0 * copy)
        assert notice.look(job.standbys, 10.0 * copy) == ""
    assert job.handle(ProcessExited(following, 1), 210.0) == [ReleaseStandbys(SERVER, 21)]
    assert notice.look(job.standbys, 211.0) == (
        "server 0 has no standby, since 20 others were started in its place within 10 minutes; "
        "the next one starts in 399 s"
    )
    assert notice.look(job.standbys, 212.0) == ""
    assert job.handle(ClockTick(), 609.9) == []
    late = Member("server", 0, copy=22)
    assert job.handle(ClockTick(), 610.0) == [StartProcesses((late,))]
    assert job.handle(ClockTick(), 611.0) == []
    job.handle(ServerReady(late), 612.0)
    assert notice.look(job.standbys, 612.0) == "standbys  ready in 602.0 s"
    assert job.handle(ProcessExited(SERVER, -9), 613.0) == [PromoteStandby(late, SERVER, 2)]
    job.validate()


@pytest.mark.parametrize("prepares", [False, True])
def test_each_of_many_moves_has_standbys(prepares: bool) -> None:
    """A job that moves 50 times in a minute, and loses a server now and then, has standbys after each."""
    job = training()
    standbys = job.standbys
    for move in range(50):
        at, servers = 3.0 + move, tuple(Member("server", rank) for rank in range(1 + move % 3))
        if prepares:
            assert len(standbys.prepare(len(servers))) == len(servers)
        job.handle(ClockTick(), at)
        job.rescale(servers)
        assert standbys.standby.keys() == set(range(len(servers)))
        for standby in standbys.standby.values():
            job.handle(ServerReady(standby), at)
        assert not standbys.unprotected()
        if move % 5 == 0:
            primary, heir = standbys.primary[0], standbys.standby[0]
            [promote] = job.handle(ProcessExited(primary, -9), at)
            assert isinstance(promote, PromoteStandby)
            assert len(job.handle(ServerReady(heir), at)) == 1
        job.validate()


def cut_off(member: Member, *answering: Member) -> MachineCutOff:
    """The machine of this one cannot be reached; those of the others answer."""
    return MachineCutOff(frozenset({member, WORKER}), frozenset(answering))


def test_a_server_that_cannot_be_reached_is_replaced() -> None:
    """Its standby takes over at once, and it is killed when it comes back; its end changes nothing more."""
    job = training()
    job.handle(ServerReady(FIRST), 2.0)
    assert job.handle(cut_off(SERVER, FIRST), 3.0) == [
        SendSignal((SERVER,), signal.SIGKILL),
        PromoteStandby(FIRST, SERVER, 2),
    ]
    assert job.handle(ServerReady(FIRST), 3.2) == [StartProcesses((SECOND,))]
    assert job.handle(ProcessExited(SERVER, -9), 13.0) == []
    assert job.failure is None
    assert job.alive == {FIRST, SECOND, WORKER}
    job.validate()


def test_a_standby_that_cannot_be_reached_is_released() -> None:
    """Its server goes on alone and gets the next one, ready or not."""
    job = training()
    assert job.handle(cut_off(FIRST, SERVER), 3.0) == [
        SendSignal((FIRST,), signal.SIGKILL),
        ReleaseStandbys(SERVER, 1),
        StartProcesses((SECOND,)),
    ]
    assert job.handle(ServerReady(FIRST), 3.1) == []
    assert job.handle(ProcessExited(FIRST, -9), 13.0) == []
    job.validate()


def test_who_cannot_be_replaced_is_waited_for() -> None:
    """Nothing happens to a worker, to a server without a ready standby, or while the standby is quiet too."""
    job = training()
    assert job.handle(cut_off(SERVER, FIRST), 3.0) == []
    job.handle(ServerReady(FIRST), 3.5)
    assert job.handle(cut_off(SERVER), 4.0) == []
    assert job.handle(cut_off(WORKER, SERVER, FIRST), 5.0) == []
    assert job.alive == {SERVER, FIRST, WORKER}
    assert job.handle(cut_off(SERVER, FIRST), 6.0)[1:] == [PromoteStandby(FIRST, SERVER, 2)]


def test_a_dead_standby_is_released_and_replaced() -> None:
    """It is forgotten first, so that it is not promoted when its primary dies at the same moment."""
    job = training()
    job.handle(ServerReady(FIRST), 2.0)
    assert job.handle(ProcessExited(FIRST, -9), 3.0) == [
        ReleaseStandbys(SERVER, 1),
        StartProcesses((SECOND,)),
    ]
    job.handle(ProcessExited(SERVER, -9), 3.0)
    assert job.failure is not None


def test_a_primary_that_is_killed_when_all_is_done() -> None:
    """Its workers have ended well and its standby has all that they pushed: the job has succeeded. The
    standby, which nobody else tells, is asked to end if it has not ended."""
    for standby_ends_first in (False, True):
        job = training()
        job.handle(ServerReady(FIRST), 2.0)
        assert job.handle(ProcessExited(WORKER, 0, left=True), 3.0) == []
        if standby_ends_first:
            assert job.handle(ProcessExited(FIRST, 0), 3.0) == []
            assert job.handle(ProcessExited(SERVER, -9), 3.0) == [FinishJob(0)]
            continue
        assert job.handle(ProcessExited(SERVER, -9), 3.0) == [SendSignal((FIRST,), signal.SIGTERM)]
        assert job.handle(ProcessExited(FIRST, 0), 3.0) == [FinishJob(0)]


def test_a_primary_waits_for_a_standby_that_has_its_copy() -> None:
    """From its first word on; a broken stream releases nobody, the launcher's word does.

    The planted faults of `return not self.required or self._taken >= end` and
    `self._attach, self.required = 0, False`.
    """
    feed = LogShipping()
    last = feed.attach(1)
    feed.append(4, [b"before"])
    feed.settle(feed.end)  # not required yet
    feed.took(1, last)
    feed.append(4, [b"after"])
    event = threading.Event()

    def wait() -> None:
        feed.settle(feed.end)
        event.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    feed.took(1, feed.end - 1)
    feed.lose(1)
    with pytest.raises(ProtocolError):
        feed.attach(2)
    assert not event.wait(0.05)
    feed.release(1)
    waiting.join(60)
    assert event.is_set()


def test_words_of_a_released_standby_do_not_count() -> None:
    """Its stream may still end, or bring what it took, when the next one follows.

    The planted fault of `return self._connected and self._attach == attach`.
    """
    feed = LogShipping()
    feed.attach(1)
    feed.release(1)
    last = feed.attach(2)
    feed.took(1, last)
    assert not feed.required
    feed.lose(1)
    assert feed.attached
    feed.took(2, last)
    assert feed.required


def test_metrics_do_not_take_back_a_record() -> None:
    """A standby may take a record while it collects its metrics; the primary waits for its confirmation."""
    host = ShardHost(Shard(), None, Deadlines())
    standby = Standby(host, Environment(servers=("unix:/nowhere",), standby=1), Access())

    def metrics() -> bytes:
        standby._took(8)
        return b"metrics"

    standby.metrics = metrics
    standby._took(7)
    standby._tell_metrics()
    requests = map(FollowRequest.FromString, standby._requests())
    _, message = next(requests), next(requests)
    assert (message.taken, message.metrics) == (8, b"metrics")


def test_released_standbys_cannot_attach() -> None:
    """A late one must not be waited for: nobody would promote it.

    The planted faults of `if number <= self._floor:` and `if self._attach and self._attach <= self._floor:`.
    """
    feed = LogShipping()
    feed.release(2)
    with pytest.raises(Fenced):
        feed.attach(2)
    feed.attach(3)
    feed.release(2)  # a late order
    assert feed.attached


def test_a_record_in_one_part_has_all_its_bytes() -> None:
    """Arrays of any shape too, also one without rows: of a push that has none for this server."""
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    parts: list[Part] = [b"head", rows[:, ::2], np.empty((0, 4), np.float32), memoryview(b"tail")]
    assert joined(parts) == b"head" + rows[:, ::2].tobytes() + b"tail"


def test_another_number_of_servers_has_other_standbys() -> None:
    """Standbys of before a move are ended, also one that was promoted to a place that goes, and do not take
    over again; every server gets another one."""
    job = training()
    job.handle(ServerReady(FIRST), 2.0)
    other, follower = Member("server", 1), Member("server", 1, copy=1)
    assert job.rescale((SERVER, other)) == [
        SendSignal((FIRST,), signal.SIGTERM),
        ReleaseStandbys(SERVER, 1),
        StartProcesses((SECOND, follower)),
    ]
    assert job.handle(ProcessExited(FIRST, -15), 3.0) == []
    job.handle(ServerReady(follower), 4.0)
    assert job.handle(ProcessExited(other, -9), 5.0) == [PromoteStandby(follower, other, 2)]
    job.handle(ServerReady(follower), 6.0)
    assert job.rescale((SERVER,))[0] == SendSignal(
        (follower, SECOND, Member("server", 1, copy=2)), signal.SIGTERM
    )
    job.validate()


def test_standbys_that_are_there_before_the_move() -> None:
    """Those that took rows meanwhile follow from the decision on, and take over if they were ready; only a
    server without one gets another."""
    job = training()
    job.handle(ServerReady(FIRST), 2.0)
    other, follower = Member("server", 1), Member("server", 1, copy=1)
    assert job.standbys.prepare(2) == (SECOND, follower)
    assert job.standbys.has_heir(SERVER)  # with the rows of before
    job.standbys.is_ready(follower)
    assert job.rescale((SERVER, other)) == [
        SendSignal((FIRST,), signal.SIGTERM),
        ReleaseStandbys(SERVER, 1),
    ]
    assert job.handle(ProcessExited(other, -9), 3.0) == [PromoteStandby(follower, other, 2)]
    assert not job.standbys.has_heir(SERVER)
    job.handle(ServerReady(SECOND), 4.0)
    assert job.handle(ProcessExited(SERVER, -9), 5.0) == [PromoteStandby(SECOND, SERVER, 2)]
    job.validate()
