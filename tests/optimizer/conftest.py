"""Every test of this folder has an embedded runtime of its own."""

from collections.abc import Iterator

import pytest

from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.runtime import interface


@pytest.fixture(autouse=True)
def fleet() -> Iterator[EmbeddedRuntime]:
    """The active runtime: fresh, and closed when the test is over."""
    fresh = EmbeddedRuntime()
    before = interface.use(fresh)
    yield fresh
    interface.use(before)
    fresh.close()
