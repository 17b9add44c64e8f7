"""Each test has an embedded runtime, programs and names of its own, and an empty folder to be in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.program import names
from psfleet.program.program import Program, program_guard
from psfleet.runtime.process_runtime import current


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of another test is seen."""
    monkeypatch.chdir(tmp_path)
    engine = EmbeddedRuntime()
    before = current().use(engine)
    with names.guard(), program_guard(Program(), Program()):
        yield
    current().use(before)
    engine.close()
