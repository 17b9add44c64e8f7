"""What another number of servers rests on, and what a move does without it."""

from collections.abc import Sequence
from typing import Any

import pytest

from psfleet.core.base.errors import PsfleetError
from psfleet.core.engine.shard.rescaled_rows import DealtShard
from psfleet.core.engine.shard.shard import Shard
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.request_files import Scaling
from psfleet_server.engine.row_moves import RowMoves
from psfleet_server.engine.server_scaling import ServerScaling
from tests.protocol.fleet.mutants import without


@without("S1: what changes behind rows sent ahead is sent again", "sync moves@3")
def _send_once(patch: pytest.MonkeyPatch) -> None:
    send = RowMoves.send

    def lazy(moves: RowMoves, number: int, to: Sequence[str], ahead: bool, hurry: bool) -> int:
        return send(moves, number, to, ahead, hurry) if ahead and not hurry else 0

    patch.setattr(RowMoves, "send", lazy)


@without("S2: workers wait until rows have moved", "sync moves@1")
def _let_workers_go(patch: pytest.MonkeyPatch) -> None:
    complete = Coordinator._complete

    def hasty(coordinator: Coordinator) -> Any:
        with pytest.MonkeyPatch.context() as none:
            if coordinator.scaling.moving is not None:
                none.setattr(coordinator, "scaling", Scaling(coordinator.scaling.endpoints))
            return complete(coordinator)

    patch.setattr(Coordinator, "_complete", hasty)


@without("S3: the view does not change while rows move", "sync moves@67")
def _change_views(patch: pytest.MonkeyPatch) -> None:
    due = Coordinator.due

    def hasty(coordinator: Coordinator) -> Any:
        with pytest.MonkeyPatch.context() as calm:
            calm.setattr(coordinator.scaling, "moving", None)
            return due(coordinator)

    patch.setattr(Coordinator, "due", hasty)


@without("S4: a new server knows of the workers what server 0 knows", "sync moves@10")
def _know_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DealtShard, "become", lambda dealt, state: None)


@without("S5: every reply tells where the servers are", "async groups moves@134")
def _forget_where(patch: pytest.MonkeyPatch) -> None:
    end = Scaling.end

    def forgetful(scaling: Scaling, endpoints: tuple[str, ...] = ()) -> None:
        end(scaling, endpoints)
        scaling.endpoints = endpoints

    patch.setattr(Scaling, "end", forgetful)


@without("S6: who has not sent all ahead sends no changes on half a copy", "sync moves@198")
def _go_on_with_half(patch: pytest.MonkeyPatch) -> None:
    move = ServerScaling._move

    def careless(
        scaling: ServerScaling, request: Any, peers: Any, ahead: bool = False, hurry: bool = False
    ) -> dict[int, int]:
        try:
            return move(scaling, request, peers, ahead, hurry)
        except PsfleetError:
            if not ahead:
                raise
            return {}

    patch.setattr(ServerScaling, "_move", careless)


@without("S7: the launcher decides", "sync moves@1")
def _decide_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServerScaling, "_decide", lambda scaling, request: None)


@without("S8: a request is carried out once", "sync moves@1")
def _carry_out_again(patch: pytest.MonkeyPatch) -> None:
    end = Scaling.end

    def forgetful(scaling: Scaling, endpoints: tuple[str, ...] = ()) -> None:
        end(scaling, endpoints)
        scaling.done = 0

    patch.setattr(Scaling, "end", forgetful)


@without("S9: every server that there was sends its rows", "sync moves@1")
def _send_from_one(patch: pytest.MonkeyPatch) -> None:
    send = RowMoves.send
    patch.setattr(
        RowMoves,
        "send",
        lambda moves, *given: 0 if moves._host.shard.index else send(moves, *given),
    )


@without("S10: what was taken replaces what was held", "sync moves@1")
def _keep_tables(patch: pytest.MonkeyPatch) -> None:
    replace = DealtShard.replace

    def lazy(dealt: DealtShard, shard: Shard) -> None:
        tables = shard.tables
        replace(dealt, shard)
        shard.tables = tables

    patch.setattr(DealtShard, "replace", lazy)


@without("S11: views reach the servers that there are", "sync moves@16")
def _keep_the_views(patch: pytest.MonkeyPatch) -> None:
    scaled = Coordinator.scaled

    def lazy(coordinator: Coordinator, endpoints: tuple[str, ...], boots: Any) -> Any:
        servers = coordinator.servers
        outcomes = scaled(coordinator, endpoints, {**coordinator._boots, **boots})
        coordinator.servers = servers
        return outcomes

    patch.setattr(Coordinator, "scaled", lazy)
