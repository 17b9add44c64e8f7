"""Leak checks for the tests of standbys."""

from collections.abc import Iterator

import pytest

from psfleet.testing.leaks import nothing_left


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every thread and child process of a test has ended when it is over."""
    with nothing_left():
        yield
