"""Each test builds in programs of its own and counts names from 0."""

from collections.abc import Iterator

import pytest

from psfleet.program import names
from psfleet.program.program import Program, program_guard


@pytest.fixture(autouse=True)
def fresh_programs() -> Iterator[None]:
    """Programs, parameters and names that no other test sees."""
    with names.guard(), program_guard(Program(), Program()):
        yield
