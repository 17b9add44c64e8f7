"""psfleet's own consistency modes; each is one small class that declares what it does."""

from dataclasses import dataclass
from typing import ClassVar

from psfleet.consistency.consistency_mode import (
    ConsistencyMode,
    ModeGuide,
    at_least_0,
    at_least_1,
    register,
)


@dataclass(frozen=True, kw_only=True)
class LatePushMode(ConsistencyMode):
    """A mode in which gradients may be stale when servers apply them."""

    staleness_damping: float = at_least_0(
        0.0,
        "p of the learning rate / (1 + staleness)^p at which a server applies a push; staleness counts "
        "the others' pushes since the worker's last pull",
    )
    delay_compensation: float = at_least_0(
        0.0,
        "c of g + c * g * g * (w - w0), by which a server corrects a gradient g that was taken at the "
        "weights w0 and meets the weights w",
    )


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


@register
@dataclass(frozen=True)
class SspMode(LatePushMode):
    """Async, but a pull waits while its worker is too far ahead of another."""

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


@register
@dataclass(frozen=True)
class GeoMode(ConsistencyMode):
    """Async, but a push brings what is to be added to the weights."""

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


@register
@dataclass(frozen=True)
class HalfAsyncMode(LatePushMode):
    """Async, but workers merge gradients before they push."""

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
