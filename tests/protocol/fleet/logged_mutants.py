"""What a move between servers that keep logs rests on, and what becomes of it without that."""

from typing import Any

import pytest

from psfleet.core.base.settings.environment import Environment
from psfleet.core.net.server_state import read_state
from psfleet_server.coordinator.request_files import Scaling
from psfleet_server.durability import log_place
from psfleet_server.durability.journal import Journal
from psfleet_server.engine.row_moves import RowMoves
from psfleet_server.engine.server_scaling import ServerScaling
from tests.protocol.fleet.mutants import replaced, without


@without("S12: a server promises its part before the decision", "sync logs moves@3")
def _promise_nothing(patch: pytest.MonkeyPatch) -> None:
    def prepare(moves: RowMoves, number: int, state: bytes) -> None:
        with moves._lock, moves._host.lock:
            moves._of(number).become(read_state(memoryview(state)).shard)

    patch.setattr(RowMoves, "prepare", prepare)


@without("S13: a process reads at its start which log counts", "async logs moves@18")
def _read_no_decision(patch: pytest.MonkeyPatch) -> None:
    def unread(environment: Environment) -> tuple[Environment, int]:
        return environment, 0

    patch.setattr(log_place, "decided", unread)


@without("S14: server 0 that starts again brings its decision to all", "sync logs moves@21")
def _keep_the_decision(patch: pytest.MonkeyPatch) -> None:
    recover = ServerScaling.recover

    def forgetful(moves: ServerScaling, scaling: Scaling, endpoints: Any, generation: int) -> None:
        recover(moves, scaling, endpoints, generation)
        moves._decided, scaling.moving = None, moves._interrupted

    patch.setattr(ServerScaling, "recover", forgetful)


@without(
    "S15: server 0 that starts again brings to all that a move is given up", "sync logs moves@77"
)
def _forget_what_is_given_up(patch: pytest.MonkeyPatch) -> None:
    recover = ServerScaling.recover

    def forgetful(moves: ServerScaling, scaling: Scaling, endpoints: Any, generation: int) -> None:
        recover(moves, scaling, endpoints, generation)
        moves._interrupted = None
        scaling.moving = scaling.moving if moves._decided else None

    patch.setattr(ServerScaling, "recover", forgetful)


without("S19: the log of before goes on until the decision", "async logs moves@12")(
    replaced(Journal, "go_on_in", lambda journal, log: None)
)
