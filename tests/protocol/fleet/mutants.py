"""The rules of the protocol, and what the product's classes are without each of them.

The numbers are those of docs/protocol.md. R16 and R17 belong to designs that were not built (decisions 11
and 19). R3 is not removed here. R19 has no entry of its own: the mutants about what a mark says and what
server 0 knows remove parts of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from psfleet.core.engine.shard.events import Leave, Push
from psfleet.core.engine.shard.membership_view import PrepareView
from psfleet.core.engine.shard.rounds import Rounds
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.shard_state import SspClock
from psfleet.core.engine.shard.snapshot_cuts import CutState, PendingCut
from psfleet.core.engine.shard.workers import Workers
from psfleet_server.coordinator import coordinator
from psfleet_server.coordinator.barriers import CollectiveCompleted, CollectiveState
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.coordinator_messages import Decision, Registration, ViewDecided
from psfleet_server.coordinator.data_dispatch import DataDispatch, Leases
from psfleet_server.coordinator.membership import Membership, Seat
from psfleet_server.durability.log_shipping import LogShipping
from psfleet_server.snapshots.snapshot_coordinator import SnapshotCoordinator, SnapshotRequest
from psfleet_worker.session import worker_session
from psfleet_worker.session.instructions import AwaitPushes
from psfleet_worker.session.worker_session import Session, Stream
from tests.protocol.fleet.calls import Release
from tests.protocol.fleet.fleet import Fleet
from tests.protocol.fleet.places import Place
from tests.protocol.fleet.primary import Primary
from tests.protocol.fleet.server import Server

Remove = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """A rule of the protocol, and how to do without it.

    Attributes:
        suite: Which runs show that it is missing.
        first: The seed to begin with: that of a short run that does.
        remove: Takes the rule from the product's classes.
    """

    rule: str
    suite: str
    first: int
    remove: Remove


MUTANTS: list[Mutant] = []
"""Rules whose absence breaks a promise."""
COVERED: list[Mutant] = []
"""Rules whose absence nothing notices, because another rule is enough for the promises."""


def without(rule: str, *suites: str, into: list[Mutant] = MUTANTS) -> Callable[[Remove], Remove]:
    """The decorated function takes the rule from the product's classes; suites: each as "name@first seed"."""

    def note(remove: Remove) -> Remove:
        for name, _, first in (suite.partition("@") for suite in suites):
            into.append(Mutant(rule, name, int(first or 0), remove))
        return remove

    return note


def instead(
    place: tuple[Any, str], rule: str, *suites: str, into: list[Mutant] = MUTANTS
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorated function stands in this place of the product; it is called with what was there first."""
    owner, name = place

    def note(do: Callable[..., Any]) -> Callable[..., Any]:
        def remove(patch: pytest.MonkeyPatch) -> None:
            before = getattr(owner, name)
            patch.setattr(owner, name, lambda *given, **named: do(before, *given, **named))

        without(rule, *suites, into=into)(remove)
        return do

    return note


def replaced(owner: type, name: str, do: Callable[..., Any]) -> Remove:
    """Without the method: what it does instead."""
    return lambda patch: patch.setattr(owner, name, do)


# -- durability ---------------------------------------------------------------------------------------


@instead((Shard, "_record"), "a push is answered when its record is logged", "sync@92", "async@1")
def _forget_pushes(record: Any, shard: Shard, entry: Any) -> None:
    if type(entry).__name__ != "Push":
        record(shard, entry)


@instead(
    (Coordinator, "_decide"),
    "a decision is on disk before it is told",
    "sync removal@6",
    "async removal@17",
)
def _forget_views(_: Any, coordinator: Coordinator, decision: Decision) -> Any:
    if coordinator.journal is not None and not isinstance(decision, ViewDecided):
        coordinator.journal(decision)
    return coordinator.replay(decision)


without("a push that was applied is not applied again", "async@1")(
    replaced(Workers, "is_new_push", lambda workers, push: True)
)
without("R1: a record takes effect when the standby has it", "async standbys@67")(
    replaced(Primary, "_is_settled", lambda primary, end: True)
)
without("R9: who is replaced does not say where it stands", "sync standbys machines@68")(
    replaced(LogShipping, "confirm", lambda feed: feed.end)
)
without("R10: a standby that is gone is required no more", "sync standbys@4", "async standbys@7")(
    replaced(LogShipping, "release", lambda feed, attach: None)
)


@instead(
    (Fleet, "_promote"),
    "R10: who is given up alive waits for its standby for ever",
    "async standbys machines@101",
    "sync standbys machines@60",
)
def _release_the_deposed(promote: Any, fleet: Fleet, place: Place) -> None:
    promote(fleet, place)
    if place.deposed:
        fleet.do(place.deposed, Release(place.attach))


# -- rounds and views ---------------------------------------------------------------------------------


@instead((Shard, "_may_close"), "R6: a frozen server closes no round", "sync removal@148")
def _close_while_frozen(closing: Any, shard: Shard) -> bool:
    return closing(shard) or (not shard.replaying and shard.rounds.is_complete())


without("R2: a round closes when all members have committed it", "sync removal@24", "sync@86")(
    replaced(
        Rounds,
        "awaited",
        lambda rounds: [seat for seat in rounds.members() if seat not in rounds.held],
    )
)
without("R5: samples of a push that does not count are dealt again", "sync removal@33")(
    lambda patch: patch.setattr(DataDispatch, "change", _without_leftovers(DataDispatch.change))
)
without("R8: an empty round closes if somebody counts in a later one", "sync removal@15")(
    replaced(Rounds, "is_complete", lambda rounds: bool(rounds.held) and not rounds.awaited())
)


def _without_leftovers(change: Callable[..., None]) -> Callable[..., None]:
    return lambda dispatch, closed, seats, counts_in: change(
        dispatch, closed, seats, lambda seat, number: True
    )


@instead(
    (Membership, "_begin"),
    "R4: a life that nobody waits for counts from the round after the next",
    "sync removal@33",
)
def _join_at_once(begin: Any, members: Membership, seat: Seat, *args: Any, **how: Any) -> None:
    begin(members, seat, *args, **how)
    first = min(seat.incarnations[-1].first, members.closed + 1)
    seat.incarnations[-1] = replace(seat.incarnations[-1], first=first)


@instead(
    (Membership, "_end"),
    "R2: a dead life counts up to the last round that is closed anywhere",
    "sync removal@4",
    "sync@38",
)
def _end_at_once(end: Any, members: Membership, seat: Seat, index: int, reports: Any) -> None:
    end(members, seat, index, reports)
    incarnation = seat.incarnations[-1] if seat.incarnations else None
    if incarnation is not None:
        seat.incarnations[-1] = replace(incarnation, last=incarnation.first - 1)


without(
    "R2: a dead life counts up to its last commit: the last closed round is enough, as every server "
    "holds a push that closed anywhere; that the commits count too saves doing a step again",
    "sync removal",
    into=COVERED,
)(replaced(Rounds, "sure_of", lambda rounds, seat: rounds.counted.get(seat, 0)))


@without("R7: what is for an earlier process of a server, or from one, is ignored", "sync@24")
def _confuse_processes(patch: pytest.MonkeyPatch) -> None:
    told, reported = Server._told, Coordinator.reported

    def confused(coordinator: Coordinator, server: int, boot: int, *rest: Any) -> Any:
        known: Any = coordinator._boots.get(server)
        return reported(coordinator, server, known, *rest)

    patch.setattr(Coordinator, "reported", confused)
    patch.setattr(
        Server, "_told", lambda server, source, boot, said: told(server, source, server.boot, said)
    )


@without("R2: a worker commits when every server holds its push", "sync removal@24")
def _commit_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker_session, "_SETTLE", AwaitPushes(1))


# -- lives --------------------------------------------------------------------------------------------


@instead(
    (Workers, "admit"), "pushes of a life that is over are refused", "async removal@13", "async@32"
)
def _admit_the_dead(
    admit: Any, workers: Workers, worker: int, incarnation: int, *, leaves: bool = False
) -> None:
    if incarnation >= workers.newest.get(worker, 0):
        admit(workers, worker, incarnation, leaves=leaves)


@instead(
    (Workers, "freeze"), "pushes of a life that is about to end are refused", "async removal@1"
)
def _admit_the_dying(freeze: Any, workers: Workers, event: PrepareView) -> None:
    freeze(workers, event)
    workers.refused = set()


# -- snapshots ----------------------------------------------------------------------------------------


@without("pushes behind a mark wait for the cut", "async snapshots@16")
def _take_pushes_behind_marks(patch: pytest.MonkeyPatch) -> None:
    def is_due(cuts: CutState, closed: int, sequences: object, left: object) -> bool:
        now = cuts.under_way
        return now is not None and now.members is not None and set(now.marks) == set(now.members)

    patch.setattr(CutState, "check_behind", lambda cuts, worker, sequence, server: None)
    patch.setattr(CutState, "is_due", is_due)


@instead(
    (CutState, "mark_worker"),
    "a mark says what was sent to a server: the cut waits for it",
    "async groups snapshots@15",
)
def _wait_for_nothing(
    mark: Any, cuts: CutState, number: int, worker: int, incarnation: int, *last: Any
) -> None:
    mark(cuts, number, worker, incarnation, last[0], 0)


@instead((Workers, "pushed"), "server 0 knows what was sent to whom", "async groups removal@33")
def _forget_addressed(pushed: Any, workers: Workers, push: Push) -> None:
    pushed(workers, replace(push, addressed=()))


@instead(
    (CutState, "mark_worker"), "R12: marks of earlier snapshots are ignored", "async snapshots@39"
)
def _take_old_marks(mark: Any, cuts: CutState, number: int, *said: Any) -> None:
    now = cuts.under_way
    mark(cuts, now.number if now else number, *said)


@without(
    "R12: no number is used twice, and a server begins no cut before its last", "async snapshots@39"
)
def _use_numbers_again(patch: pytest.MonkeyPatch) -> None:
    take = SnapshotCoordinator.request

    def forgetful(
        coordinator: SnapshotCoordinator, call: Any, request: SnapshotRequest, seen: int
    ) -> Any:
        return take(coordinator, call, request, 0)

    def begin(cuts: CutState, cutting: PendingCut) -> None:
        cuts.under_way = cutting

    patch.setattr(SnapshotCoordinator, "request", forgetful)
    patch.setattr(CutState, "begin_cut", begin)


@instead(
    (CutState, "give_up"),
    "R11: a view change gives up the snapshot under way: the lives whose marks are awaited are those of "
    "the view before, and who leads the snapshot gives it up when these marks do not come",
    "async snapshots",
    into=COVERED,
)
def _keep_cuts_across_views(
    give_up: Any, cuts: CutState, number: int | None = None, failure: Any = None
) -> None:
    if number is not None:
        give_up(cuts, number, failure)


@without(
    "pushes after a mark carry it: a server that has taken a push behind a mark never cuts there, so that "
    "the snapshot is given up; that the push waits for the cut saves taking it again",
    "async snapshots",
    into=COVERED,
)
def _hide_marks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Stream, "cut", property(lambda stream: (0, 0), lambda stream, cut: None), raising=False
    )


@instead(
    (SnapshotCoordinator, "_placed"),
    "R13: workers that come while servers are asked where to cut are known",
    "sync snapshots@19",
)
def _overlook_who_comes(placed: Any, coordinator: SnapshotCoordinator, standings: Any) -> Any:
    first = replace(standings[0], incarnations=coordinator._now.members)
    return placed(coordinator, (first, *standings[1:]))


# -- data ---------------------------------------------------------------------------------------------


@instead((DataDispatch, "give_back"), "a torn step is declared", "async removal@32")
def _hide_torn_steps(give_back: Any, dispatch: DataDispatch, *args: Any) -> None:
    count = len(dispatch.torn)
    give_back(dispatch, *args)
    del dispatch.torn[count:]


without("what is left of a dead worker's lease is dealt again", "async removal@3", "async@2")(
    replaced(Leases, "left", lambda leases, position: [])
)


# -- ssp, and changes of the mode -----------------------------------------------------------------------

without("ssp: a pull waits for the slowest worker", "ssp@16")(
    replaced(SspClock, "awaited", lambda gate, pull, live: [])
)
without("R14: a worker that waits for the others holds nobody back", "ssp@3", "switch@2")(
    replaced(Rounds, "running", lambda rounds: sorted(rounds.seats - rounds.left))
)


@instead(
    (Coordinator, "_complete"),
    "R18: the mode is not changed while a view is: what is decided rests on what the workers have brought "
    "to the meeting, not on reports, and who dies meanwhile has not come to it",
    "sync mode_requests",
    "async mode_requests",
    into=COVERED,
)
def _change_while_busy(complete: Any, coordinator: Coordinator) -> Any:
    with pytest.MonkeyPatch.context() as within:
        within.setattr(Coordinator, "is_busy", False)
        return complete(coordinator)


without("R15: numbers go on where those of the mode before have ended", "sync mode_requests@8")(
    replaced(Workers, "go_on_from", lambda workers, last: None)
)


@instead(
    (Session, "meet"),
    "a worker that waits for the others says so to the servers",
    "rests@1",
    "ssp@3",
)
def _wait_in_silence(_: Any, session: Session, *given: Any, meet: Any = Session.meet) -> Any:
    step = next(program := meet(session, *given))
    result = yield program.send(None) if isinstance(step, Leave) else step
    with pytest.raises(StopIteration):
        program.send(result)
    return result


@instead(
    (Session, "change_mode"),
    "a later life passes over the changes of the mode that the fleet has made",
    "sync mode_requests@59",
)
def _change_again(change: Any, session: Session, mode: Any, last: int) -> Any:
    session._switches = 0
    return change(session, mode, last)


@instead(
    (CollectiveState, "take"),
    "W1: who passes a barrier later is told of the same wish",
    "sync mode_requests@20",
)
def _forget_mode_requests(
    take: Any, collectives: CollectiveState, completed: CollectiveCompleted
) -> object:
    released = take(collectives, completed)
    collectives.told.clear()
    return released


without(
    "W2: what is not used when the mode changes is dealt in the new way", "async mode_requests@11"
)(replaced(DataDispatch, "turn", lambda dispatch, to_rounds, reached: None))


@instead(
    (coordinator, "Registration"),
    "W3: who registers is told of the last change of the mode",
    "sync mode_requests@19",
)
def _hide_changes(
    _: Any, call: Any, incarnation: int, first: int, view: int, completed: int, *rest: object
) -> Registration:
    return Registration(call, incarnation, first, view, completed)
