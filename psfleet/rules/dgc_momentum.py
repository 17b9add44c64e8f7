"""The server's side of deep gradient compression (Lin et al., 2018): momentum, then none."""

from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.rule import Rule, Slot, UnitInterval

__all__ = ["DGCMomentum"]


def dgc_momentum(w, g, velocity, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    velocity = h[1] * velocity + h[2] * g
    return w - h[0] * (h[3] * velocity + h[4] * g), velocity


@dataclass(frozen=True)
class DGCMomentum(Rule):
    """Momentum for the first `rampup_begin_step` updates, then w -= lr * g.

    From then on the momentum is in the workers' compressed gradients, and the velocity here rests.
    """

    momentum: UnitInterval = 0.9
    rampup_begin_step: int = 0
    use_nesterov: bool = False
    name = "dgc_momentum"

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("velocity", smallest="int8"),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return dgc_momentum

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        if step > self.rampup_begin_step:
            return (learning_rate, 1.0, 0.0, 0.0, 1.0)
        ahead = (self.momentum, 1.0) if self.use_nesterov else (1.0, 0.0)
        return (learning_rate, self.momentum, 1.0, *ahead)
