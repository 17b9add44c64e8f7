"""A user's own module that declares modes, for as long as a test lasts."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from psfleet.core.engine.consistency import MODES

__all__ = ["module_of_modes"]


def module_of_modes(
    name: str, source: str, folder: Path, patch: pytest.MonkeyPatch
) -> Iterator[None]:
    """For a fixture: the module is imported, and servers find it too; then psfleet forgets its modes."""
    patch.syspath_prepend(str(folder))
    (folder / f"{name}.py").write_text(source)
    before = dict(MODES)
    importlib.invalidate_caches()
    importlib.import_module(name)
    yield
    sys.modules.pop(name, None)
    MODES.clear()
    MODES.update(before)
