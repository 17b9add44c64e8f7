"""Every thread and child process of a test has ended when it is over."""

from collections.abc import Iterator

import pytest

from psfleet.testing.leaks import nothing_left


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """See nothing_left; what fixtures of a module keep running is theirs."""
    with nothing_left():
        yield
