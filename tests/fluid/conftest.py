"""Each test has an embedded runtime, programs and names of its own, and an empty folder to be in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.program import names
from psfleet.program.program import Program, program_guard
from psfleet.runtime import interface


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of another test is seen."""
    monkeypatch.chdir(tmp_path)
    engine = EmbeddedRuntime()
    before = interface.use(engine)
    with names.guard(), program_guard(Program(), Program()):
        yield
    interface.use(before)
    engine.close()
