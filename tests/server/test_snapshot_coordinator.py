"""The state machine that takes snapshots: which events lead to which instructions."""

import pytest

from psfleet.checkpoint import CutPosition
from psfleet.core.base.errors import CheckpointError, DeadlineExceeded, ServerUnavailable
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet_server.snapshots.snapshot_events import (
    AnnounceSnapshot,
    AwaitParts,
    BeginCuts,
    CloseDraft,
    CompleteSnapshot,
    CutLost,
    CutMade,
    MembersChanged,
    OpenDraft,
    PublishSnapshot,
    ServersReplied,
    SettleCuts,
    SnapshotEvent,
    SnapshotFailed,
    SnapshotPart,
    SnapshotPostponed,
    SnapshotPublished,
    SnapshotRequest,
    SnapshotRequested,
    Standing,
    StopSnapshots,
    TimePassed,
    WarnOperator,
    WatchCut,
    WorkerIntroduced,
    WorkerStateArrived,
)
from psfleet_server.snapshots.snapshot_under_way import Stage
from tests.server.snapshot_play import (
    ASYNC,
    INCARNATIONS,
    OPENED,
    PLACED,
    Chaos,
    Play,
    failed,
    learned,
    parts,
)


def test_a_process_before_had_begun_snapshots() -> None:
    """A server 0 that has started again numbers its first snapshot when it has heard each worker, above all
    of which they have heard: a worker takes part once in each number. It does not wait for a dead worker."""
    play, everybody = Play(), frozenset(INCARNATIONS)
    assert not play(MembersChanged(frozenset(), frozenset(), everybody))
    assert not play.request(seen=6)
    assert not play(MembersChanged(frozenset(), frozenset({0}), frozenset({1}), 9))
    assert not play.request(call="b")
    assert play(MembersChanged(frozenset(), everybody, last=8)) == [OpenDraft(9, "")]
    late = Play()
    late(MembersChanged(frozenset(), frozenset({0}), frozenset({1}), 9))
    assert not late.request()
    assert not late(TimePassed(), seconds=9.9)
    assert late(TimePassed(), seconds=0.1) == [OpenDraft(10, "")]


@pytest.mark.parametrize(
    ("closed", "last", "round_"), [(4, 0, 6), (5, 0, 6), (6, 0, 6), (6, 6, 9), (7, 6, 9)]
)
def test_every_third_round(closed: int, last: int, round_: int) -> None:
    """The next multiple that is not in a snapshot yet; it is waited for without a deadline."""
    play = Play()
    if last:
        synchronous(play, last)
    standing = Standing("sync", closed, INCARNATIONS)
    [begin] = play.begin(standing, standing, every=3)
    assert isinstance(begin, BeginCuts)
    assert begin.cutting.round == round_
    number = begin.cutting.number
    assert play(PLACED) == [WatchCut(number)]
    assert play(TimePassed(), seconds=1e6) == []
    assert play(CutMade(number)) == [AnnounceSnapshot(number), AwaitParts(number, cut=True)]


def synchronous(play: Play, last: int) -> None:
    """Take a whole snapshot after a round."""
    standing = Standing("sync", last, INCARNATIONS)
    play.begin(standing, standing)
    cut = CutPosition(1, "sync", last, {})
    written = ServersReplied((SnapshotPart(cut, ""), SnapshotPart(cut, "")))
    play(PLACED, ServersReplied(), written)
    play(SnapshotPublished(), ServersReplied())


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (SnapshotRequested("b", SnapshotRequest(), 0), "it waited for round 6"),
        (StopSnapshots(), "it waited for round 6"),
        (CutLost(1), "a worker or a server came or went"),
    ],
)
def test_a_snapshot_that_waits_for_its_round_gives_way(event: SnapshotEvent, why: str) -> None:
    """To another one, to the end of the server, to a change of the fleet; the next one begins then."""
    play = Play()
    standing = Standing("sync", 4, INCARNATIONS)
    play.begin(standing, standing, every=3)
    play(PLACED)
    assert play(event) == [AnnounceSnapshot(None), SettleCuts(1, False, 0)]
    actual = play(ServersReplied())
    error = failed(actual)
    assert isinstance(error, SnapshotPostponed)
    assert str(error) == f"snapshot 1 was not taken: {why}"
    assert (OpenDraft(2, "") in actual) == isinstance(event, SnapshotRequested)


def test_servers_that_disagree_are_asked_again() -> None:
    """A worker comes to one server before the other; after the time for a cut the snapshot is given up."""
    play = Play()
    other = Standing("async", 0, {0: 11})
    assert play.begin(ASYNC, other) == []
    assert play(TimePassed()) == []
    again = play(TimePassed(), seconds=play.coordinator.deadline - play.now)
    assert again == [BeginCuts("/job/.partial", PendingCut(1))]
    play(ServersReplied((ASYNC, other)))
    assert play(TimePassed(), seconds=11) == [AnnounceSnapshot(None), SettleCuts(1, False, 0)]
    error = failed(play(ServersReplied()))
    assert isinstance(error, DeadlineExceeded)
    assert "the servers do not agree on who is in the fleet" in str(error)


@pytest.mark.parametrize("steps", range(6))
def test_a_failure_of_any_step(steps: int) -> None:
    """The servers are told, the draft is removed, and who asked gets the error with the number; a server
    that has not been asked for anything is not told either. The next snapshot has another number."""
    play = Play()
    cut = parts({})
    events: list[SnapshotEvent] = [
        OPENED,
        *[ServersReplied((Standing("sync", 4, {}), Standing("sync", 4, {})))] * 2,
        ServersReplied(),
        ServersReplied(cut),
    ]
    play.request()
    play(*events[:steps])
    actual = play(SnapshotFailed(ServerUnavailable("server 1 is away")))
    if steps:
        assert actual == [AnnounceSnapshot(None), SettleCuts(1, False, 0)]
        actual = play(ServersReplied())
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
    actual = failed(play(SnapshotFailed(error)))
    assert isinstance(actual, CheckpointError)
    assert str(actual) == f"snapshot 1 was not taken: {text}"


# -- deltas ----------------------------------------------------------------------------------------


def test_a_delta_builds_on_the_last_base() -> None:
    """If every server remembers it; the manifest names it, and servers may forget earlier ones."""
    play = Play()
    play.complete(base=True)
    remembers = Standing("async", 0, INCARNATIONS, (1,))
    [begin] = play.begin(remembers, remembers, delta=True)
    assert begin == BeginCuts(
        "/job/.partial", PendingCut(2, members=INCARNATIONS, since=1, remember=True)
    )
    play(ServersReplied((remembers, remembers)), *learned(2), ServersReplied())
    [publish] = play(ServersReplied(parts({}, 2)))
    assert isinstance(publish, PublishSnapshot)
    assert publish.base == OPENED.path
    assert play(SnapshotPublished())[1] == SettleCuts(2, True, 2)


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


def test_a_snapshot_of_somebody_else() -> None:
    """Logs do not start from a snapshot with a path of its own, and the job's own ones stay."""
    play = Play()
    play.write(path="/elsewhere")
    assert play(SnapshotPublished())[1] == SettleCuts(1, False, 0)
    assert play(ServersReplied()) == [CloseDraft(), CompleteSnapshot("a", 1, OPENED.path)]


# -- workers ---------------------------------------------------------------------------------------


def test_workers_that_do_not_learn_in_time() -> None:
    """The snapshot is given up, and who waits for the others is told that it is over."""
    play = Play()
    play.mark()
    play(learned()[1])
    actual = play(TimePassed(), seconds=11)
    assert str(failed(actual)) == "snapshot 1 is over"
    error = failed(play(ServersReplied()))
    assert isinstance(error, DeadlineExceeded)
    assert str(error) == ("snapshot 1 was not taken: workers [0] have not heard of it in time")


def test_states_that_do_not_come() -> None:
    """Those that have introduced themselves with state are waited for, and those that have not introduced
    themselves since the server has started but are alive; the error names who is missing."""
    play = Play()
    play(WorkerIntroduced(0, 11, keeps=True), MembersChanged(frozenset(), frozenset({0, 1})))
    assert play.write() == []
    assert play(WorkerStateArrived(1, 1, 12, None, 7)) == []
    play(TimePassed(), seconds=11)
    error = str(failed(play(ServersReplied())))
    assert error == "snapshot 1 was not taken: it waits for what workers [0] keep"


@pytest.mark.parametrize("keeps", [True, False])
def test_the_state_of_a_worker_that_has_left(keeps: bool) -> None:
    """It is the last one that is not behind the cut; a new incarnation of the worker forgets it."""
    play = Play()
    farewell = WorkerStateArrived(0, 1, 12, [[6, "six"], [7, "seven"], [8, "eight"]])
    play(WorkerIntroduced(1, 12, keeps=keeps), farewell)
    [publish] = play.write()
    assert isinstance(publish, PublishSnapshot)
    assert publish.states == ({1: "seven"} if keeps else {})
    play(SnapshotPublished(), ServersReplied(), WorkerIntroduced(1, 13, keeps=False))
    incarnations = {0: 11, 1: 13}
    play.begin(Standing("async", 0, incarnations), Standing("async", 0, incarnations))
    placed = ServersReplied(
        (Standing("async", 0, incarnations), Standing("async", 0, incarnations))
    )
    play(placed, *learned(2, incarnations), ServersReplied())
    [publish] = play(ServersReplied(parts({1: (13, 9)}, 2)))
    assert isinstance(publish, PublishSnapshot)
    assert publish.states == {}


# -- the end of the server -------------------------------------------------------------------------


# -- all kinds of order ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_random_schedules(seed: int) -> None:
    """Whatever comes when: every call is answered once, numbers rise, every snapshot that has begun is
    settled once, and complete is only what is published; the state never contradicts itself."""
    chaos = Chaos(seed)
    for _ in range(600):
        chaos.step()
    chaos.hand(StopSnapshots())
    while chaos.play.coordinator.stage is not Stage.IDLE:
        chaos.hand(chaos.due.pop() if chaos.due else TimePassed())
    assert chaos.published
    assert chaos.settled == list(dict.fromkeys(chaos.begun))
    assert set(chaos.replies.values()) == {1}
    assert {f"r{number + 1}" for number in range(chaos.requests)} <= set(chaos.replies)
