"""geo: workers train on copies and send what they have learned, see psfleet.mode_runtimes.geo."""

from dataclasses import dataclass
from typing import ClassVar

from psfleet.consistency.consistency_mode import ConsistencyMode, ModeGuide, at_least_1
from psfleet.consistency.finding_modes import register

__all__ = ["GeoMode"]


@register
@dataclass(frozen=True)
class GeoMode(ConsistencyMode):
    """As async, but a push brings what is to be added to the weights."""

    k_steps: int = at_least_1(10, "steps between two exchanges", names="--k-steps")
    copied_rows: int = at_least_1(
        1 << 20, "rows of a sparse table that a worker keeps copies of, at most"
    )
    name = "geo"
    number = 4
    adds_deltas = True
    runtime = "psfleet.mode_runtimes.geo:GeoRuntime"
    conflicts: ClassVar = {
        "dgc": "one sends the largest gradients of each step, the other none",
        "amp": "in geo mode gradients do not travel; leave amp out",
        "wire": "what travels in geo mode is added to the weights as it is; leave wire out",
        "pipeline": "stages have different parameters, and geo counts them as workers of one model",
    }
    main_setting = "k_steps"
    a_sync: ClassVar = {"k_steps": "k_steps"}
    a_sync_off = (0, -1)
    guide = ModeGuide(
        "updates the worker's local copies; every `k_steps`-th sends the changes",
        "mostly read from the copies",
        "every change is added once",
        "unsent changes of a worker that dies are lost; each worker has its own optimizer state",
    )
