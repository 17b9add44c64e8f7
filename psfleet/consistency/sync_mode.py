"""sync: bit-reproducible rounds, the default."""

from dataclasses import dataclass

from psfleet.consistency.consistency_mode import ConsistencyMode, ModeGuide
from psfleet.consistency.finding_modes import register

__all__ = ["SyncMode"]


@register
@dataclass(frozen=True)
class SyncMode(ConsistencyMode):
    """Bulk synchronous rounds: one push of every worker, averaged in worker order."""

    name = "sync"
    number = 1
    has_rounds = True
    guide = ModeGuide(
        "is held; the mean of all workers' pushes is one update",
        "waits for the round",
        "the same bits for any number of servers, order and faults",
        "that a fast worker never waits",
    )
