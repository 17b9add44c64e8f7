"""Generated names for variables and parameters that the user does not name.

Tables are named after parameters. So every process that runs the same script must generate the same names.
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
    """Number the generated names of every prefix from 0 again."""
    _counts.clear()


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Number generated names from 0 within the block. Networks built under guards get equal names.

    with program_guard(train, startup), unique_name.guard():
        build()
    with program_guard(test, startup), unique_name.guard():
        build()  # the same names, so it shares the parameters
    """
    global _counts
    before, _counts = _counts, Counter()
    try:
        yield
    finally:
        _counts = before
