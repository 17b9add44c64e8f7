"""The tickets of pushes and pulls that are over when they are given out."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["CompletedPull", "CompletedPush"]

Floats = NDArray[np.float32]


class CompletedPush:
    """See PendingPush of psfleet.runtime.interface."""

    def wait(self, timeout: float | None = None) -> None:
        """Return at once."""


class CompletedPull:
    """See PendingPull of psfleet.runtime.interface."""

    def __init__(self, values: list[Floats]) -> None:
        self._values = values

    def wait(self) -> list[Floats]:
        """The values."""
        return self._values
