"""Text files line by line, and what is wrong in one of them."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from psfleet.errors import UsageError

__all__ = ["lines_of", "number", "whole"]


@contextlib.contextmanager
def lines_of(path: str | Path) -> Iterator[Iterator[str]]:
    """The lines of a UTF-8 file without their ends; what is no UTF-8 becomes U+FFFD.

    The file is closed at the end of the block, also when a reader stops at a bad line.

    Raises:
        UsageError: The file cannot be read.
    """
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            yield (line.rstrip("\r\n") for line in file)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def number(text: str, name: str, where: str) -> float:
    """The finite number that a text stands for.

    Args:
        name: What the number is. where: File and line, for the message.

    Raises:
        UsageError: It stands for none.
    """
    try:
        found = float(text)
    except ValueError:
        raise UsageError(f"{where}: {name} {text!r} is not a number") from None
    if not math.isfinite(found):
        raise UsageError(f"{where}: {name} {text!r} is not a finite number")
    return found


def whole(text: str, name: str, where: str) -> int:
    """The whole number from -2^62 to 2^62 that a text stands for, see `number`."""
    try:
        found = int(text)
    except ValueError:
        raise UsageError(f"{where}: {name} {text!r} is not a whole number") from None
    if not -(2**62) <= found <= 2**62:
        raise UsageError(f"{where}: {name} {text!r} is beyond 2^62")
    return found
