"""ssp: stale synchronous parallel (Ho et al., 2013), a bound on how far workers are apart."""

from dataclasses import dataclass
from typing import ClassVar

from psfleet.consistency.consistency_mode import ModeGuide, at_least_0
from psfleet.consistency.finding_modes import register
from psfleet.consistency.late_pushes import LatePushMode

__all__ = ["SspMode"]


@register
@dataclass(frozen=True)
class SspMode(LatePushMode):
    """As async, but a pull waits while its worker is too far ahead of another."""

    staleness: int = at_least_0(2, "pushes a worker may be ahead of another", names="--staleness")
    name = "ssp"
    number = 3
    has_clocks = True
    main_setting = "staleness"
    a_sync: ClassVar = {"staleness": "staleness"}
    guide = ModeGuide(
        "as in async",
        "waits while this worker is more than `staleness` pushes ahead of the slowest",
        "that bound, at every answer of every server",
        "the same bits twice",
    )
