"""Every test of this folder has an embedded runtime of its own."""

from collections.abc import Iterator

import pytest

from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.runtime.process_runtime import current


@pytest.fixture(autouse=True)
def fleet() -> Iterator[EmbeddedRuntime]:
    """The active runtime: fresh, and closed when the test is over."""
    fresh = EmbeddedRuntime()
    before = current().use(fresh)
    yield fresh
    current().use(before)
    fresh.close()
