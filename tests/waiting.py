"""Wait for conditions, never for a time."""

import time
from collections.abc import Callable

__all__ = ["until"]

_LOOK = 0.01  # seconds between looks
_PATIENCE = 120.0  # seconds; a loaded machine may be slow


def until(holds: Callable[[], object], what: Callable[[], object] | str = "") -> None:
    """Return once the condition holds.

    Args:
        what: What the error says that was found or awaited.
    """
    deadline = time.monotonic() + _PATIENCE
    while not holds():
        assert time.monotonic() < deadline, what() if callable(what) else f"no {what}"
        time.sleep(_LOOK)
