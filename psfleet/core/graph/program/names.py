"""Generated names for variables and parameters that the user does not name.

Names of tables come from them, so that every process that runs the same script must count alike.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator

_counts: Counter[str] = Counter()


def generate(key: str) -> str:
    """Return the next name with this prefix: `key_0`, then `key_1`, ..."""
    number = _counts[key]
    _counts[key] += 1
    return f"{key}_{number}"


def renew() -> None:
    """Start all counts again from 0."""
    _counts.clear()


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Count from 0 inside the block, so that two networks built under guards get equal names."""
    global _counts
    before, _counts = _counts, Counter()
    try:
        yield
    finally:
        _counts = before
