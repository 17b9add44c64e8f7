"""No test of this folder finds a runtime, or leaves one."""

from collections.abc import Iterator

import pytest

from psfleet.core.runtime.process_runtime import current


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No runtime before, none afterwards."""
    before = current().use(None)
    yield
    current().use(before)
