"""An eviction policy whose score has all that kernels take: for tests of devices."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from psfleet.core.engine.rules.eviction_policy import EvictionPolicy


def worth(age: float, frequency: float, shows: float, clicks: float, h: tuple[float]) -> float:
    """A product and a sum that a device would join; divisions by 0; a choice between numbers and none."""
    rate = clicks / shows * 3 + h[0] * frequency
    return -age if clicks > 2 else max(min(rate, 0.5, shows), -math.sqrt(shows - 1))


@dataclass(frozen=True)
class Worth(EvictionPolicy):
    """The policy with this score."""

    name = "worth"

    def score(self) -> Callable[..., float]:
        return worth

    def scalars(self) -> tuple[float, ...]:
        return (0.3,)

    @property
    def frequency_half_life(self) -> float:
        return 2.5
