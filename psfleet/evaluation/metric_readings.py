"""What a fleet's sums say at one time: over the whole run, over a window, and with decay."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ConfigError

__all__ = ["MetricReading", "Readings"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MetricReading:
    """Values by name, such as "auc", "ctr/auc" of task ctr, "ctr/auc[mobile]" of its slice mobile.

    Attributes:
        run: Over the whole run.
        window: Over what was counted since the reading that was `window` readings ago; empty without
            a window.
        decayed: Each interval between two readings weighs `decay` times the next one; empty without a
            decay.
    """

    run: dict[str, float]
    window: dict[str, float] = field(default_factory=dict)
    decayed: dict[str, float] = field(default_factory=dict)


class Readings:
    """Earlier readings, as far as windows and decay need them: a fixed amount of memory.

    Args:
        window: Readings of the window; 0: no window.
        decay: Weight of an interval between two readings, relative to the next one; 0: no decay.

    Raises:
        ConfigError: One is out of range.
    """

    def __init__(self, window: int, decay: float) -> None:
        if window < 0:
            raise ConfigError(f"window is {window}; give a number of readings, or 0 for none")
        if not 0 <= decay < 1:
            raise ConfigError(f"decay is {decay}; it must be at least 0 and below 1")
        self._decay = decay
        self._earlier: deque[Floats] = deque(maxlen=max(window, 1))
        self._last: Floats | None = None
        self._decayed: Floats | None = None

    def window(self, totals: Floats) -> Floats:
        """The sums over the window that ends with `totals`."""
        full = len(self._earlier) == self._earlier.maxlen
        found = totals - self._earlier[0] if full else totals
        self._earlier.append(totals)
        return found

    def decayed(self, totals: Floats) -> Floats:
        """The sums with decay up to `totals`."""
        if self._last is None or self._decayed is None:
            self._decayed = totals
        else:
            self._decayed = self._decay * self._decayed + (totals - self._last)
        self._last = totals
        return self._decayed
