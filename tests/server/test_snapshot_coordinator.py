"""The state machine that takes snapshots: which calls lead to which instructions."""

from collections.abc import Callable

import pytest

from psfleet.core.base.errors import (
    CheckpointError,
    DeadlineExceeded,
    NoRoom,
    NotReady,
    ServerUnavailable,
)
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet_server.snapshots.snapshot_coordinator import (
    AnnounceSnapshot,
    AwaitParts,
    BeginCuts,
    CloseDraft,
    CompleteSnapshot,
    OpenDraft,
    PublishSnapshot,
    SettleCuts,
    SnapshotCoordinator,
    SnapshotEvent,
    SnapshotPostponed,
    SnapshotRequest,
    Stage,
    Standing,
    WarnOperator,
    WatchCut,
)
from tests.server.snapshot_play import ASYNC, DRAFT, INCARNATIONS, PATH, Chaos, Play, failed, parts

CHANGE = NotReady("a worker or a server came or went")


def test_a_process_before_had_begun_snapshots() -> None:
    """A server 0 that has started again numbers its first snapshot when it has heard each worker, above all
    of which they have heard: a worker takes part once in each number. It does not wait for a dead worker."""
    play, nobody, everybody = Play(), frozenset[int](), frozenset(INCARNATIONS)
    assert not play.coordinator.members_changed(nobody, nobody, everybody)
    assert not play.request(seen=6)
    assert not play.coordinator.members_changed(nobody, frozenset({0}), frozenset({1}), 9)
    assert not play.request(call="b")
    [open_draft] = play.coordinator.members_changed(nobody, everybody, last_snapshot=8)
    assert open_draft == OpenDraft(9, "")
    late = Play()
    late.coordinator.members_changed(nobody, frozenset({0}), frozenset({1}), 9)
    assert not late.request()
    assert not late.wait(9.9)
    assert late.wait(0.1) == [OpenDraft(10, "")]


@pytest.mark.parametrize(
    ("closed", "last", "round_"), [(4, 0, 6), (5, 0, 6), (6, 0, 6), (6, 6, 9), (7, 6, 9)]
)
def test_every_third_round(closed: int, last: int, round_: int) -> None:
    """The next multiple that is not in a snapshot yet; it is waited for without a deadline."""
    play = Play()
    if last:
        synchronous(play, last, every=3)
    standing = Standing("sync", closed, INCARNATIONS)
    [begin] = play.begin(standing, standing, every=3)
    assert isinstance(begin, BeginCuts)
    assert begin.cutting.round == round_
    number = begin.cutting.number
    assert play.coordinator.servers_replied([standing, standing]) == [WatchCut(number)]
    assert play.wait(1e6) == []
    cut = play.coordinator.cut_ended(number)
    assert cut == [AnnounceSnapshot(number), AwaitParts(number, cut=True)]


@pytest.mark.parametrize(("asked", "closed", "round_"), [(6, 6, 6), (7, 7, 9), (5, 5, 6)])
def test_a_requested_snapshot_moves_no_multiple(asked: int, closed: int, round_: int) -> None:
    """The schedule's next snapshot holds the next multiple of three rounds, also if somebody has requested
    one of that very round meanwhile."""
    play = Play()
    synchronous(play, 3, every=3)
    synchronous(play, asked)
    standing = Standing("sync", closed, INCARNATIONS)
    [begin] = play.begin(standing, standing, every=3)
    assert isinstance(begin, BeginCuts)
    assert begin.cutting.round == round_


def synchronous(play: Play, last: int, every: int = 0) -> None:
    """Take a whole snapshot after a round."""
    standing = Standing("sync", last, INCARNATIONS)
    [begin] = play.begin(standing, standing, every=every)
    assert isinstance(begin, BeginCuts)
    play.coordinator.servers_replied([standing, standing])
    if every:
        play.coordinator.cut_ended(begin.cutting.number)
    play.coordinator.servers_replied()
    play.coordinator.servers_replied(parts({}, "sync", last))
    play.publish()


@pytest.mark.parametrize(
    ("event", "why", "begins"),
    [
        (lambda machine: machine.request("b", SnapshotRequest(), 0), "it waited for round 6", True),
        (SnapshotCoordinator.stop, "it waited for round 6", False),
        (lambda machine: machine.cut_ended(1, CHANGE), "a worker or a server came or went", False),
    ],
)
def test_a_snapshot_that_waits_for_its_round_gives_way(
    event: SnapshotEvent, why: str, begins: bool
) -> None:
    """To another one, to the end of the server, to a change of the fleet; the next one begins then."""
    play = Play()
    standing = Standing("sync", 4, INCARNATIONS)
    play.begin(standing, standing, every=3)
    play.coordinator.servers_replied([standing, standing])
    assert event(play.coordinator) == [AnnounceSnapshot(None), SettleCuts(1, False, 0)]
    actual = play.coordinator.servers_replied()
    error = failed(actual)
    assert isinstance(error, SnapshotPostponed)
    assert str(error) == f"snapshot 1 was not taken: {why}"
    assert (OpenDraft(2, "") in actual) == begins


def test_a_snapshot_that_waits_for_workers_gives_way() -> None:
    """To a change of the fleet, after which the schedule tries again without a word."""
    play = Play()
    play.mark()
    play.coordinator.cut_ended(1, CHANGE)
    error = failed(play.coordinator.servers_replied())
    assert isinstance(error, SnapshotPostponed)
    assert str(error) == "snapshot 1 was not taken: a worker or a server came or went"


def test_a_change_of_members_while_servers_cut() -> None:
    """Is no fault either: the schedule tries again without a word."""
    play = Play()
    play.mark()
    play.learn(1)
    assert play.coordinator.stage is Stage.CUTTING
    play.coordinator.step_failed(CHANGE)
    error = failed(play.coordinator.servers_replied())
    assert isinstance(error, SnapshotPostponed)
    assert str(error) == "snapshot 1 was not taken: a worker or a server came or went"


def test_a_cut_that_the_log_refuses() -> None:
    """Is a fault with a reason. As a change of members it was tried again for ever, without a word."""
    play = Play()
    standing = Standing("sync", 4, INCARNATIONS)
    play.begin(standing, standing, every=3)
    play.coordinator.servers_replied([standing, standing])
    play.coordinator.cut_ended(1, NoRoom("the log cannot be written"))
    error = failed(play.coordinator.servers_replied())
    assert isinstance(error, NoRoom)
    assert str(error) == "snapshot 1 was not taken: the log cannot be written"


def test_servers_that_disagree_are_asked_again() -> None:
    """A worker comes to one server before the other; after the time for a cut the snapshot is given up."""
    play = Play()
    other = Standing("async", 0, {0: 11})
    assert play.begin(ASYNC, other) == []
    assert play.wait() == []
    again = play.wait(play.coordinator.deadline - play.now)
    assert again == [BeginCuts(DRAFT, PendingCut(1))]
    play.coordinator.servers_replied([ASYNC, other])
    assert play.wait(11) == [AnnounceSnapshot(None), SettleCuts(1, False, 0)]
    error = failed(play.coordinator.servers_replied())
    assert isinstance(error, DeadlineExceeded)
    assert "the servers do not agree on who is in the fleet" in str(error)


@pytest.mark.parametrize("steps", range(6))
def test_a_failure_of_any_step(steps: int) -> None:
    """The servers are told, the draft is removed, and who asked gets the error with the number; a server
    that has not been asked for anything is not told either. The next snapshot has another number."""
    play = Play()
    standing = Standing("sync", 4, {})
    replies: list[Callable[[], object]] = [
        lambda: play.coordinator.draft_opened(PATH, DRAFT),
        *[lambda: play.coordinator.servers_replied([standing, standing])] * 2,
        lambda: play.coordinator.servers_replied(),
        lambda: play.coordinator.servers_replied(parts({})),
    ]
    play.request()
    for reply in replies[:steps]:
        reply()
    actual = play.coordinator.step_failed(ServerUnavailable("server 1 is away"))
    if steps:
        assert actual == [AnnounceSnapshot(None), SettleCuts(1, False, 0)]
        actual = play.coordinator.servers_replied()
    assert actual[0] == CloseDraft()
    error = failed(actual)
    assert isinstance(error, ServerUnavailable)
    assert str(error) == "snapshot 1 was not taken: server 1 is away"
    assert play.request() == [OpenDraft(2, "")]


@pytest.mark.parametrize(
    ("error", "text"),
    [(OSError("the disk is gone"), "the disk is gone"), (KeyError("file"), "KeyError('file')")],
)
def test_errors_of_others(error: Exception, text: str) -> None:
    """What is no error of psfleet becomes one of the snapshot."""
    play = Play()
    play.request()
    actual = failed(play.coordinator.step_failed(error))
    assert isinstance(actual, CheckpointError)
    assert str(actual) == f"snapshot 1 was not taken: {text}"


def test_a_delta_builds_on_the_last_base() -> None:
    """If every server remembers it; the manifest names it, and servers may forget earlier ones."""
    play = Play()
    play.complete(base=True)
    remembers = Standing("async", 0, INCARNATIONS, (1,))
    [begin] = play.begin(remembers, remembers, delta=True)
    assert begin == BeginCuts(DRAFT, PendingCut(2, members=INCARNATIONS, since=1, remember=True))
    play.coordinator.servers_replied([remembers, remembers])
    play.learn(2)
    play.coordinator.servers_replied()
    [publish] = play.coordinator.servers_replied(parts({}))
    assert isinstance(publish, PublishSnapshot)
    assert publish.base == PATH
    assert play.coordinator.published()[1] == SettleCuts(2, True, 2)


def test_a_delta_that_a_server_cannot_say() -> None:
    """It holds everything, and a line says which server remembers nothing."""
    play = Play()
    play.complete(base=True)
    warning, begin = play.begin(Standing("async", 0, INCARNATIONS, (1,)), ASYNC, delta=True)
    assert isinstance(warning, WarnOperator)
    assert warning.line.startswith(
        "snapshot 2 was to be a delta and holds everything: server 1 remembers no earlier one"
    )
    assert isinstance(begin, BeginCuts)
    assert begin.cutting.since == 0


def test_only_own_snapshots_are_pruned() -> None:
    """After one of the job's own is complete, the oldest of them go."""
    assert Play().complete() == [CloseDraft(prune=True), CompleteSnapshot("a", 1, PATH)]


def test_a_snapshot_of_somebody_else() -> None:
    """Logs do not start from a snapshot with a path of its own, and the job's own ones stay."""
    play = Play()
    play.write(path="/elsewhere")
    assert play.coordinator.published()[1] == SettleCuts(1, False, 0)
    assert play.coordinator.servers_replied() == [CloseDraft(), CompleteSnapshot("a", 1, PATH)]


def test_workers_that_do_not_learn_in_time() -> None:
    """The snapshot is given up, and who waits for the others is told that it is over."""
    play = Play()
    play.mark()
    play.coordinator.worker_learned("w1", 1, 1, 12)
    actual = play.wait(11)
    assert str(failed(actual)) == "snapshot 1 is over"
    error = failed(play.coordinator.servers_replied())
    assert isinstance(error, DeadlineExceeded)
    assert str(error) == ("snapshot 1 was not taken: workers [0] have not heard of it in time")


def test_states_that_do_not_come() -> None:
    """Those that have introduced themselves with state are waited for, and those that have not introduced
    themselves since the server has started but are alive; the error names who is missing."""
    play = Play()
    play.coordinator.worker_introduced(0, 11, keeps=True)
    play.coordinator.members_changed(frozenset(), frozenset({0, 1}))
    assert play.write() == []
    assert play.coordinator.state_delivered(1, 1, 12, 7, None) == []
    play.wait(11)
    error = str(failed(play.coordinator.servers_replied()))
    assert error == "snapshot 1 was not taken: it waits for what workers [0] keep"


@pytest.mark.parametrize("keeps", [True, False])
def test_the_state_of_a_worker_that_has_left(keeps: bool) -> None:
    """It is the last one that is not behind the cut; a new incarnation of the worker forgets it."""
    play = Play()
    play.coordinator.worker_introduced(1, 12, keeps=keeps)
    play.coordinator.farewell_delivered(1, 12, [[6, "six"], [7, "seven"], [8, "eight"]])
    [publish] = play.write()
    assert isinstance(publish, PublishSnapshot)
    assert publish.states == ({1: "seven"} if keeps else {})
    play.publish()
    play.coordinator.worker_introduced(1, 13, keeps=False)
    incarnations = {0: 11, 1: 13}
    standing = Standing("async", 0, incarnations)
    play.begin(standing, standing)
    play.coordinator.servers_replied([standing, standing])
    play.learn(2, incarnations)
    play.coordinator.servers_replied()
    [publish] = play.coordinator.servers_replied(parts({1: (13, 9)}))
    assert isinstance(publish, PublishSnapshot)
    assert publish.states == {}


@pytest.mark.parametrize("seed", range(30))
def test_random_schedules(seed: int) -> None:
    """Whatever comes when: every call is answered once, numbers rise, every snapshot that has begun is
    settled once, and complete is only what is published; the state never contradicts itself."""
    chaos = Chaos(seed)
    for _ in range(600):
        chaos.step()
    chaos.hand(SnapshotCoordinator.stop)
    while chaos.play.coordinator.stage is not Stage.IDLE:
        chaos.hand(chaos.due.pop() if chaos.due else SnapshotCoordinator.time_passed)
    assert chaos.published
    assert chaos.settled == list(dict.fromkeys(chaos.begun))
    assert set(chaos.replies.values()) == {1}
    assert {f"r{number + 1}" for number in range(chaos.requests)} <= set(chaos.replies)
