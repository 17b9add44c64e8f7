"""Parts of a server that go on where a real one would end."""

from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.shard_state import ShardState
from psfleet_server.durability.log_shipping import LogShipping
from psfleet_server.engine.row_moves import RowMoves


class Undying(LogShipping):
    """A feed whose process does not end when it hears that it is deposed: this one has more to try."""

    def depose(self, term: int) -> None:
        pass


class Staying(RowMoves):
    """Moves of a server that keeps its tables in the end: this one has more to try."""

    def adopt(self, number: int) -> None:
        self.abandon(number)

    def copy(self, servers: int) -> tuple[LogShipping, Shard, ShardState]:
        """Its standbys cannot end it."""
        _, shard, state = super().copy(servers)
        return self._host.feed, shard, state
