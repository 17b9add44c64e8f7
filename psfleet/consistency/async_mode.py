"""async: no worker waits for another."""

from dataclasses import dataclass

from psfleet.consistency.consistency_mode import ModeGuide
from psfleet.consistency.finding_modes import register
from psfleet.consistency.late_pushes import LatePushMode

__all__ = ["AsyncMode"]


@register
@dataclass(frozen=True)
class AsyncMode(LatePushMode):
    """Each push is applied when it arrives."""

    name = "async"
    number = 2
    guide = ModeGuide(
        "is applied when it arrives",
        "is answered at once",
        "each push counts once; a worker sees its own pushes",
        "any bound on how far workers are apart; the same bits twice",
    )
