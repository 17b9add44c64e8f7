"""A shard at one moment, to be written to a snapshot while it goes on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # its parts take events, and one of these carries a frozen shard
    from psfleet.shard.shard_state import ShardState
    from psfleet.tables.row_snapshot import FrozenTable  # workers have events, but no tables

__all__ = ["FrozenShard"]


@dataclass(frozen=True)
class FrozenShard:
    """Read once, then closed.

    Attributes:
        number: Of the cut; 0: none was asked for.
        index, servers: Whose shard it is.
        tables: Their content.
        state: Everything else that the shard is.
        mode, round: Of the fleet.
        pushes: By seat: (incarnation, last push in it).
        since: Only what has changed since the cut of this number is in the tables; 0: everything.
    """

    number: int
    index: int
    servers: int
    tables: "Sequence[FrozenTable]"
    state: "ShardState"
    mode: str = ""
    round: int = 0
    pushes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    since: int = 0

    def close(self) -> None:
        """The tables need not remember the moment any more."""
        for table in self.tables:
            table.close()
