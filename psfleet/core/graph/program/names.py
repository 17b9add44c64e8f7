"""Names for what the user does not name: the same in every process that runs the same script."""

import contextlib
from collections import Counter
from collections.abc import Iterator

_counts: Counter[str] = Counter()


def generate(key: str) -> str:
    """`key_0`, then `key_1`, ..."""
    number = _counts[key]
    _counts[key] += 1
    return f"{key}_{number}"


def renew() -> None:
    """Count from 0."""
    _counts.clear()


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Count from 0 inside the block: two networks built under guards get equal names."""
    global _counts
    before, _counts = _counts, Counter()
    try:
        yield
    finally:
        _counts = before
