"""half-async: a queue in each worker merges gradients, see psfleet.mode_runtimes.half_async."""

from dataclasses import dataclass
from typing import ClassVar

from psfleet.consistency.consistency_mode import ModeGuide, at_least_1
from psfleet.consistency.finding_modes import register
from psfleet.consistency.late_pushes import LatePushMode

__all__ = ["HalfAsyncMode"]


@register
@dataclass(frozen=True)
class HalfAsyncMode(LatePushMode):
    """As async; workers merge gradients before they push."""

    max_merge: int = at_least_1(8, "gradients that are summed to one push, at most")
    queue_size: int = at_least_1(16, "gradients that may wait before the worker does")
    name = "half-async"
    number = 5
    merges_pushes = True
    runtime = "psfleet.mode_runtimes.half_async:HalfAsyncRuntime"
    main_setting = "max_merge"
    a_sync: ClassVar = {"max_merge_var_num": "max_merge", "send_queue_size": "queue_size"}
    a_sync_off = (1,)
    guide = ModeGuide(
        "waits in a queue; up to `max_merge` are summed into one",
        "is answered at once, without queued pushes",
        "each gradient is in one push, once; at most `queue_size` wait",
        "that a worker sees its own last gradients",
    )
