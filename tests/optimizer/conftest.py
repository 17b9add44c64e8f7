"""Every test of this folder has an embedded runtime of its own."""

from collections.abc import Iterator

import pytest

from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from tests.runtimes import own_runtime


@pytest.fixture(autouse=True)
def fleet() -> Iterator[EmbeddedRuntime]:
    """The active runtime: fresh, and closed when the test is over."""
    with own_runtime() as runtime:
        yield runtime
