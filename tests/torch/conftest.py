"""Every test of this folder has an embedded runtime of its own, and one thread for torch."""

from collections.abc import Iterator

import pytest

from psfleet import runtime
from psfleet.embedded import EmbeddedRuntime


@pytest.fixture(autouse=True)
def fleet() -> Iterator[EmbeddedRuntime]:
    """The active runtime: fresh, and closed when the test is over."""
    fresh = EmbeddedRuntime()
    before = runtime.use(fresh)
    yield fresh
    runtime.use(before)
    fresh.close()
