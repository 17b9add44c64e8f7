"""What a move rests on where servers have standbys or followers, and what becomes of it without that."""

import pytest

from psfleet.core.engine.shard.follower_changes import ChangeLog
from psfleet.core.net.frame import Part
from psfleet_server.durability.log_shipping import LogShipping
from psfleet_server.engine.row_moves import RowMoves
from tests.protocol.fleet.mutants import without


@without("S21: what a new owner takes goes to its next standby too", "sync standbys moves@0")
def _send_to_no_standby(patch: pytest.MonkeyPatch) -> None:
    put = RowMoves._put

    def lazy(moves: RowMoves, kind: int, parts: list[Part]) -> None:
        with pytest.MonkeyPatch.context() as none:
            none.setattr(moves, "feed", LogShipping())
            put(moves, kind, parts)

    patch.setattr(RowMoves, "_put", lazy)


@without("S22: a standby that takes over reads what is decided", "sync standbys moves@33")
def _read_no_decision(patch: pytest.MonkeyPatch) -> None:
    begin = RowMoves.begin
    patch.setattr(RowMoves, "begin", lambda moves, generation: begin(moves, 0))


@without("S23: after a move the next standby follows", "sync standbys moves@3")
def _keep_the_standby(patch: pytest.MonkeyPatch) -> None:
    adopt = RowMoves.adopt

    def forgetful(moves: RowMoves, number: int) -> None:
        adopt(moves, number)
        moves._host.feed = LogShipping()

    patch.setattr(RowMoves, "adopt", forgetful)


without("S24: no version of what has changed outlives a move", "sync logs followers moves@6")(
    lambda patch: patch.setattr(ChangeLog, "number_after", lambda log, before: None)
)
