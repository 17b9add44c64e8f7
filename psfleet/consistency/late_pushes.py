"""Settings that several modes share: what servers do about stale gradients."""

from dataclasses import dataclass

from psfleet.consistency.consistency_mode import ConsistencyMode, at_least_0

__all__ = ["LatePushMode"]


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
