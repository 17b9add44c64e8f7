"""What another number of servers rests on, also with logs and standbys, and what a move does without it."""

from collections.abc import Sequence
from typing import Any

import pytest

from psfleet.core.base.errors import PsfleetError
from psfleet.core.base.settings.environment import Environment
from psfleet.core.engine.shard.follower_changes import ChangeLog
from psfleet.core.engine.shard.rescaled_rows import DealtShard
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.net.frame import Part
from psfleet.core.net.server_state import read_state
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.request_files import Scaling
from psfleet_server.durability import log_place
from psfleet_server.durability.journal import Journal
from psfleet_server.durability.log_shipping import LogShipping
from psfleet_server.engine.row_moves import RowMoves
from psfleet_server.engine.server_scaling import ServerScaling
from tests.protocol.fleet.mutants import instead, replaced, without


@instead(
    (RowMoves, "send"), "S1: what changes behind rows sent ahead is sent again", "sync moves@3"
)
def _send_once(
    send: Any, moves: RowMoves, number: int, to: Sequence[str], ahead: bool, hurry: bool
) -> int:
    return send(moves, number, to, ahead, hurry) if ahead and not hurry else 0


@instead((Coordinator, "_complete"), "S2: workers wait until rows have moved", "sync moves@1")
def _let_workers_go(complete: Any, coordinator: Coordinator) -> Any:
    with pytest.MonkeyPatch.context() as none:
        if coordinator.scaling.moving is not None:
            none.setattr(coordinator, "scaling", Scaling(coordinator.scaling.endpoints))
        return complete(coordinator)


@instead((Coordinator, "due"), "S3: the view does not change while rows move", "sync moves@67")
def _change_views(due: Any, coordinator: Coordinator) -> Any:
    with pytest.MonkeyPatch.context() as calm:
        calm.setattr(coordinator.scaling, "moving", None)
        return due(coordinator)


@without("S4: a new server knows of the workers what server 0 knows", "sync moves@10")
def _know_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DealtShard, "become", lambda dealt, state: None)


@instead((Scaling, "end"), "S5: every reply tells where the servers are", "async groups moves@134")
def _forget_where(end: Any, scaling: Scaling, endpoints: tuple[str, ...] = ()) -> None:
    end(scaling, endpoints)
    scaling.endpoints = endpoints


@instead(
    (ServerScaling, "_move"),
    "S6: who has not sent all ahead sends no changes on half a copy",
    "sync moves@198",
)
def _go_on_with_half(move: Any, *given: Any, ahead: bool = False, hurry: bool = False) -> Any:
    try:
        return move(*given, ahead, hurry)
    except PsfleetError:
        if not ahead:
            raise
        return {}


without("S7: the launcher decides", "sync moves@1")(
    replaced(ServerScaling, "_decide", lambda scaling, request: None)
)


@instead((Scaling, "end"), "S8: a request is carried out once", "sync moves@1")
def _carry_out_again(end: Any, scaling: Scaling, endpoints: tuple[str, ...] = ()) -> None:
    end(scaling, endpoints)
    scaling.done = 0


@without("S9: every server that there was sends its rows", "sync moves@1")
def _send_from_one(patch: pytest.MonkeyPatch) -> None:
    send = RowMoves.send
    patch.setattr(
        RowMoves,
        "send",
        lambda moves, *given: 0 if moves._host.shard.index else send(moves, *given),
    )


@instead((DealtShard, "replace"), "S10: what was taken replaces what was held", "sync moves@1")
def _keep_tables(replace: Any, dealt: DealtShard, shard: Shard) -> None:
    tables = shard.tables
    replace(dealt, shard)
    shard.tables = tables


@instead((Coordinator, "scaled"), "S11: views reach the servers that there are", "sync moves@16")
def _keep_the_views(
    scaled: Any, coordinator: Coordinator, endpoints: tuple[str, ...], boots: Any
) -> Any:
    servers = coordinator.servers
    outcomes = scaled(coordinator, endpoints, {**coordinator._boots, **boots})
    coordinator.servers = servers
    return outcomes


# -- servers that keep logs -----------------------------------------------------------------------


@instead(
    (RowMoves, "prepare"),
    "S12: a server promises its part before the decision",
    "sync logs moves@3",
)
def _promise_nothing(_: Any, moves: RowMoves, number: int, state: bytes) -> None:
    with moves._lock, moves._host.lock:
        moves._of(number).become(read_state(memoryview(state)).shard)


@instead(
    (log_place, "decided"),
    "S13: a process reads at its start which log counts",
    "async logs moves@18",
)
def _start_from_the_old_log(_: Any, environment: Environment) -> tuple[Environment, int]:
    return environment, 0


@instead(
    (ServerScaling, "recover"),
    "S14: server 0 that starts again brings its decision to all",
    "sync logs moves@21",
)
def _keep_the_decision(
    recover: Any, moves: ServerScaling, scaling: Scaling, endpoints: Any, generation: int
) -> None:
    recover(moves, scaling, endpoints, generation)
    moves._decided, scaling.moving = None, moves._interrupted


@instead(
    (ServerScaling, "recover"),
    "S15: server 0 that starts again brings to all that a move is given up",
    "sync logs moves@77",
)
def _forget_what_is_given_up(
    recover: Any, moves: ServerScaling, scaling: Scaling, endpoints: Any, generation: int
) -> None:
    recover(moves, scaling, endpoints, generation)
    moves._interrupted = None
    scaling.moving = scaling.moving if moves._decided else None


without("S19: the log of before goes on until the decision", "async logs moves@12")(
    replaced(Journal, "go_on_in", lambda journal, log: None)
)


# -- servers that have standbys or followers ------------------------------------------------------


@instead(
    (RowMoves, "_put"),
    "S21: what a new owner takes goes to its next standby too",
    "sync standbys moves@0",
)
def _send_to_no_standby(put: Any, moves: RowMoves, kind: int, parts: list[Part]) -> None:
    with pytest.MonkeyPatch.context() as none:
        none.setattr(moves, "feed", LogShipping())
        put(moves, kind, parts)


@without("S22: a standby that takes over reads what is decided", "sync standbys moves@33")
def _take_over_undecided(patch: pytest.MonkeyPatch) -> None:
    begin = RowMoves.begin
    patch.setattr(RowMoves, "begin", lambda moves, generation: begin(moves, 0))


@instead((RowMoves, "adopt"), "S23: after a move the next standby follows", "sync standbys moves@3")
def _keep_the_standby(adopt: Any, moves: RowMoves, number: int) -> None:
    adopt(moves, number)
    moves._host.feed = LogShipping()


without("S24: no version of what has changed outlives a move", "sync logs followers moves@6")(
    lambda patch: patch.setattr(ChangeLog, "number_after", lambda log, before: None)
)
