"""Lines for a person on standard error, from code that must go on when the stream takes nothing."""

import contextlib
import sys

__all__ = ["say"]


def say(text: str) -> None:
    """Print a line. A stream on a full disk, or closed, is no reason to fail: the line is lost."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
