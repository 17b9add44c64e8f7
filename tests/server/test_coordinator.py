"""Lives and collectives, as a pure state machine."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from psfleet.core.base import errors
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.consistency import SyncMode
from psfleet.core.engine.round_plan import LOOKAHEAD, PlanEntry, RoundPlan
from psfleet.core.engine.shard.events import SendError
from psfleet.core.engine.shard.membership_view import ViewReport
from psfleet.core.net.membership_messages import write_mode
from psfleet_server.coordinator.barriers import REDUCTIONS, Arrival, CollectiveReply
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.coordinator_messages import (
    Decision,
    Heartbeat,
    Outcome,
    Registration,
)
from psfleet_server.coordinator.data_dispatch import DataDispatch, DatasetRequest
from tests.server.seating import register, settled


def registered(workers: int) -> Coordinator:
    """A coordinator whose workers have the incarnations 1, 2, 3, ..."""
    coordinator = Coordinator(workers)
    incarnations = [register(coordinator, w, w + 100, workers) for w in range(workers)]
    assert incarnations == [*range(1, workers + 1)]
    return coordinator


def barrier(worker: int, number: int = 1) -> Arrival:
    """Worker w with incarnation w + 1 at a barrier."""
    return Arrival(worker, worker + 1, number)


def reduction(worker: int, value: Any, mode: str = "sum", number: int = 1) -> Arrival:
    """The same with an array."""
    return Arrival(worker, worker + 1, number, mode, np.asarray(value, np.float32))


def error_of(outcome: list[Outcome]) -> errors.PsfleetError:
    """The error of the only refusal."""
    [refusal] = outcome
    assert isinstance(refusal, SendError)
    return refusal.error


def test_a_start_gets_one_incarnation() -> None:
    """Registering again is answered with the same incarnation; a new start gets a new one."""
    coordinator = registered(2)
    assert register(coordinator, 0, 100, 2) == 1
    assert register(coordinator, 0, 555, 2) == 3
    with pytest.raises(errors.Fenced, match="later process"):
        register(coordinator, 0, 100, 2)


def test_foreign_workers_are_refused() -> None:
    """A seat that does not exist, or another belief in the fleet's size."""
    with pytest.raises(errors.ConfigError, match="worker 2 is unknown"):
        register(Coordinator(2), 2, 1, 2)
    with pytest.raises(errors.ConfigError, match="was started for 3"):
        register(Coordinator(2), 0, 1, 3)


@pytest.mark.parametrize(("mode", "expected"), [("sum", 1.0), ("max", 1e8), ("min", -1e8)])
def test_a_reduction_goes_in_worker_order(mode: str, expected: float) -> None:
    """Whatever the order of arrival, values are combined from worker 0 up."""
    coordinator = registered(3)
    values = [1e8, -1e8, 1.0]
    outcomes = [
        o for w in (2, 0, 1) for o in coordinator.arrive(reduction(w, [values[w]], mode), f"c{w}")
    ]
    assert [o.value for o in outcomes if isinstance(o, CollectiveReply)] == [
        np.float32(expected)
    ] * 3


def test_what_does_not_belong_together_is_refused() -> None:
    """Another shape, another kind of collective, a skipped number or an unknown way to combine."""
    coordinator = registered(3)
    coordinator.arrive(reduction(0, [1, 2]), "c0")
    assert isinstance(error_of(coordinator.arrive(reduction(1, [1]), "c1")), errors.ShapeError)
    assert isinstance(
        error_of(coordinator.arrive(reduction(1, [1, 2], "max"), "c1")), errors.ShapeError
    )
    assert isinstance(error_of(coordinator.arrive(barrier(1), "c1")), errors.ProtocolError)
    assert isinstance(error_of(coordinator.arrive(barrier(1, 2), "c1")), errors.Gap)
    assert isinstance(
        error_of(coordinator.arrive(reduction(1, [1, 2], "mean"), "c")), errors.UsageError
    )
    coordinator.arrive(reduction(1, [1, 2]), "c1")
    assert len(coordinator.arrive(reduction(2, [1, 2]), "c2")) == 3


def test_only_the_present_incarnation_may_come() -> None:
    """An incarnation that is over is fenced, one that has not begun is not ready; an old arrival is
    refused."""
    coordinator = registered(2)
    coordinator.arrive(barrier(0), "old")
    coordinator.register(0, 999, 2, "new process")
    old, new = settled(coordinator)
    assert isinstance(error_of([old]), errors.Fenced)
    assert isinstance(new, Registration)
    incarnation = new.incarnation
    assert isinstance(error_of(coordinator.arrive(barrier(0), "c")), errors.Fenced)
    assert isinstance(
        error_of(coordinator.arrive(Arrival(0, incarnation + 1, 1), "c")), errors.NotReady
    )
    assert coordinator.arrive(barrier(1), "c1") == []
    assert len(coordinator.arrive(Arrival(0, incarnation, 1), "new")) == 2


def test_an_expired_wait_names_the_missing() -> None:
    """The expired call is refused with the names; its worker stays arrived."""
    coordinator = registered(3)
    coordinator.arrive(barrier(1), "c1")
    error = error_of(coordinator.expire("c1"))
    assert isinstance(error, errors.DeadlineExceeded)
    assert "waits for worker 0, worker 2" in str(error)
    assert coordinator.expire("c1") == []
    coordinator.arrive(barrier(0), "c0")
    assert coordinator.arrive(barrier(2), "c2") == [
        CollectiveReply("c0", None),
        CollectiveReply("c2", None),
    ]


def test_an_incarnation_that_is_over_hears_so() -> None:
    """The heartbeat of an earlier incarnation of a seat is answered with Fenced."""
    coordinator = Coordinator(1)
    incarnation = register(coordinator, 0, 7, 1)
    coordinator.take_heartbeat(Heartbeat(0, incarnation=incarnation), 1.0)
    register(coordinator, 0, 8, 1)
    with pytest.raises(errors.Fenced):
        coordinator.take_heartbeat(Heartbeat(0, incarnation=incarnation), 2.0)


def switch(number: int, mode: Mode, change: int) -> Arrival:
    """Worker 0 with incarnation 1 at a mode switch, the `change`-th of its script."""
    request = [write_mode(mode), 0]
    brought = np.array([*request, *(-each for each in request), 4 * number])
    return Arrival(0, 1, number, "switch", brought, change=change, round=4 * number)


def test_a_switch_that_was_made_is_passed_over() -> None:
    """A process that begins its script again comes to it once more, and the fleet stays in its mode."""
    coordinator = registered(1)
    modes: tuple[tuple[Mode, int], ...] = (("async", 1), ("sync", 2), ("async", 1))
    for number, (mode, change) in enumerate(modes, 1):
        coordinator.arrive(switch(number, mode, change), "c")
        settled(coordinator)
    outcomes = [*coordinator.register(0, 555, 1, "register"), *settled(coordinator)]
    [actual] = [one.switch for one in outcomes if isinstance(one, Registration)]
    assert actual is not None
    assert (actual.number, actual.mode) == (2, SyncMode())


@pytest.mark.parametrize(("last", "first"), [(5, 6), (3, 5 + LOOKAHEAD + 1)])
def test_no_process_begins_in_closed_rounds(last: int, first: int) -> None:
    """It takes up behind its predecessor's last round, unless others have closed rounds since."""
    coordinator = registered(1)
    report = ViewReport("sync", 5, {0: 1}, {0: last})
    outcomes = [*coordinator.register(0, 555, 1, "register"), *settled(coordinator, report)]
    assert [one.first for one in outcomes if isinstance(one, Registration)] == [first]


def test_a_late_request_begins_no_plan() -> None:
    """After sync mode, async mode and sync mode again the worker's first request is heard once more: samples
    of the rounds since would be passed over."""
    coordinator = registered(1)
    asked = DatasetRequest(1, 24, 2, 1, round=1)
    assert coordinator.assign_data(0, 1, asked) == RoundPlan(
        24, 2, (PlanEntry(1, (0,), ((0, 24),)),)
    )
    modes: tuple[Mode, ...] = ("async", "sync")
    for number, mode in enumerate(modes, 1):
        report = ViewReport("sync", 4, {0: 1}, {0: 4}) if mode == "async" else ViewReport("async")
        arrived = coordinator.arrive(switch(number, mode, change=number), "c")
        assert len([*arrived, *settled(coordinator, report)]) == 1
    with pytest.raises(errors.Gap, match="round 1 was asked for before the fleet changed modes"):
        coordinator.assign_data(0, 1, asked)
    plan = coordinator.assign_data(0, 1, dataclasses.replace(asked, round=9))
    assert isinstance(plan, RoundPlan)
    assert [entry.first for entry in plan.entries] == [9]


def test_the_last_to_arrive_releases_all() -> None:
    """Nobody passes before everybody is there; a repeated arrival is answered again."""
    coordinator = registered(3)
    assert coordinator.arrive(barrier(2), "c2") == []
    assert coordinator.arrive(barrier(0), "c0") == []
    assert coordinator.arrive(barrier(0), "c0 again") == []
    outcome = coordinator.arrive(barrier(1), "c1")
    assert outcome == [CollectiveReply(c, None) for c in ("c0", "c0 again", "c1", "c2")]
    assert coordinator.arrive(barrier(1), "late") == [CollectiveReply("late", None)]
    assert coordinator.arrive(barrier(1, 2), "next") == []


def broken(*arguments: object) -> Any:
    raise MemoryError("no bytes")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.LogError("the log cannot be written"), "the log cannot be written"),
        (MemoryError("no bytes"), "the server failed: MemoryError: no bytes; see its log"),
    ],
)
def test_all_workers_hear_of_a_failed_collective(error: Exception, text: str) -> None:
    """The last worker to arrive got the error, and the others waited for their deadline."""
    coordinator = registered(2)

    def refuse(decision: Decision) -> None:
        raise error

    assert coordinator.arrive(reduction(0, [1.0]), "a") == []
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(error, errors.LogError):
            patch.setattr(coordinator, "journal", refuse)
        else:
            patch.setitem(REDUCTIONS, "sum", broken)
        outcomes = coordinator.arrive(reduction(1, [2.0]), "b")
    assert [(type(outcome), outcome.call) for outcome in outcomes] == [
        (SendError, "a"),
        (SendError, "b"),
    ]
    assert {str(error_of([outcome])) for outcome in outcomes} == {text}
    # All may try again, with the same number.
    assert coordinator.arrive(reduction(0, [1.0]), "a") == []
    assert len(coordinator.arrive(reduction(1, [2.0]), "b")) == 2


@pytest.mark.parametrize("keeps", [False, True])
def test_half_a_decision_is_the_last(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that the log has and the coordinator lacks would be granted twice. So it decides nothing
    more, whether the error comes from the decision or from a standby that is sent it."""
    coordinator, decisions = registered(1), list[Decision]()

    def keep(decision: Decision) -> None:
        decisions.append(decision)
        if not keeps:
            broken()

    coordinator.journal = keep
    if keeps:
        monkeypatch.setattr(DataDispatch, "take", broken)
    request = DatasetRequest(1, 10, 1, 1, 0)
    with pytest.raises(MemoryError):
        coordinator.assign_data(0, 1, request)
    monkeypatch.undo()
    coordinator.journal = decisions.append
    with pytest.raises(errors.PsfleetError, match=r"half of a decision.*MemoryError: no bytes"):
        coordinator.assign_data(0, 1, request)
    assert "half of a decision" in str(error_of(coordinator.arrive(barrier(0), "a")))
    assert len(decisions) == 1
