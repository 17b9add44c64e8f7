"""What holds in all tests: Hypothesis counts examples, processes start fast, and nothing is left behind."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from psfleet.testing.leaks import nothing_left
from tests import starter

# By number of examples, never by time: that a machine does other things is no fault of what is tested.
settings.register_profile("by number", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("by number")
starter.install()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every thread and child process of a test has ended when it is over."""
    starter.start_zygote()
    with nothing_left():
        yield
