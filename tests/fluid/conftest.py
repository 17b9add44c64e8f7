"""Each test has an embedded runtime, programs and names of its own, and an empty folder to be in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtimes import own_programs, own_runtime


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of another test is seen."""
    monkeypatch.chdir(tmp_path)
    with own_runtime(), own_programs():
        yield
