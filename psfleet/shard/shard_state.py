"""What a shard is beside the content of its tables, as a value."""

import copy
from dataclasses import dataclass, field

from psfleet.shard.mode_state import ConsistencyState
from psfleet.shard.rounds import Rounds
from psfleet.shard.workers import Workers

__all__ = ["ShardState"]


@dataclass(frozen=True)
class ShardState:
    """What of a shard is stored; whatever is not here starts anew with its process.

    Attributes:
        workers: Their lives, and how far these are.
        consistency: The mode with its rounds and clocks.
        cut: Number of the last snapshot for which the shard was cut.
        makers: By key of the table the worker that made it, if one did.
    """

    workers: Workers = field(default_factory=lambda: Workers(0, 0))
    consistency: ConsistencyState = field(
        default_factory=lambda: ConsistencyState(0, Rounds(set()))
    )
    cut: int = 0
    makers: dict[int, int] = field(default_factory=dict)

    def copied(self) -> "ShardState":
        """The same value, of which nothing changes later. Held pushes never change and are shared."""
        held = {id(push): push for push in self.consistency.rounds.held.values()}
        return copy.deepcopy(self, held)
