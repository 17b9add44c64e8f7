"""Each test builds in programs of its own, counts names from 0, and has an embedded runtime of its own."""

from collections.abc import Iterator

import pytest

from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from tests.runtimes import own_programs, own_runtime


@pytest.fixture(autouse=True)
def fleet() -> Iterator[EmbeddedRuntime]:
    """The active runtime; parameters, programs and names are such that no other test sees."""
    with own_runtime() as runtime, own_programs():
        yield runtime
