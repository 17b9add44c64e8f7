"""The API reference has every public name, and the public methods of every public class."""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.programs import IN_DOCS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = IN_DOCS
INNER = {
    # Their names are those of their package.
    *("psfleet.layers.*", "psfleet.optimizer.rule_optimizers", "psfleet.fleet.fleet"),
    *("psfleet.fluid.eager_schedules", "psfleet.fluid.layer_modules", "psfleet.fluid.tensor"),
    # These are no faces for users.
    *("psfleet.data.parquet", "psfleet.core.base.arrow", "psfleet.core.engine.schema.table"),
    *(
        "psfleet.core.runtime.stages",
        "psfleet.core.base.validation.annotations",
        "psfleet.core.net.*",
    ),
}
"""Modules with `__all__` that have no page."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The modules of each page, the headings of each page, and its text."""
    pytest.importorskip("griffe", reason="griffe is not installed: pip install psfleet[docs]")
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        api_pages = importlib.import_module("api_pages")
    finally:
        sys.path.remove(str(ROOT / "tools"))
    folder = tmp_path_factory.mktemp("site") / "api"
    api_pages.write(ROOT, folder)
    texts = {path.stem: path.read_text() for path in folder.glob("*.md")}
    headings = {page: re.findall(r"^#+ (\S+)$", text, re.M) for page, text in texts.items()}
    return api_pages.PAGES, headings, texts


def public(module: ModuleType) -> dict[str, Any]:
    """The public names of a module; torch's, which need PyTorch, where that is installed."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]
    if module.__name__ == "psfleet.torch" and find_spec("torch") is None:
        return dict.fromkeys(names)
    found = {name: getattr(module, name) for name in names}
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}


def methods(kind: type) -> Iterator[str]:
    """The public methods and properties of a class that are psfleet's and have a text."""
    for base in kind.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("psfleet") else ():
            is_member = inspect.isroutine(value) or isinstance(value, property | classmethod)
            if is_member and not name.startswith("_") and getattr(value, "__doc__", None):
                yield name


def test_every_public_name_and_method_is_on_its_page(pages: Any) -> None:
    """Each name of `__all__` has a heading on the page of its module. Each method has one on the page of its
    class, or on that of a class from which it comes."""
    of_pages, headings, _ = pages
    public_names = {
        page: [public(importlib.import_module(path)) for path in paths]
        for page, paths in of_pages.items()
    }
    of_classes: dict[type, str] = {}
    for page, modules in public_names.items():
        for kind in (value for names in modules for value in names.values()):
            if isinstance(kind, type):
                of_classes.setdefault(kind, page)
    missing = {
        f"{page}: {name}"
        for page, modules in public_names.items()
        for names in modules
        for name in names
        if name not in headings[page]
    }
    missing |= {
        f"{page}: {kind.__name__}.{name}"
        for kind, page in of_classes.items()
        for name in methods(kind)
        if not any(name in headings[of_classes[one]] for one in kind.__mro__ if one in of_classes)
    }
    assert not missing, "\n".join(sorted(missing))
    assert sum(len(names) for modules in public_names.values() for names in modules) > 400


def test_a_result_is_one_item(pages: Any) -> None:
    """Also one that a docstring describes in several lines."""
    results = [
        items.count("- ")
        for text in pages[2].values()
        for items in re.findall(r"^\*\*Returns\*\*\n\n((?:- .*\n)+)", text, re.M)
    ]
    assert len(results) > 20
    assert {*results} == {1}


def test_every_public_module_has_a_page(pages: Any) -> None:
    """A module that lists public names is on a page, unless its names are those of its package."""
    listed = {path for paths in pages[0].values() for path in paths}
    for file in (ROOT / "psfleet").rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        path = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        is_inner = path in INNER or f"{path.rpartition('.')[0]}.*" in INNER
        if re.search(r"^__all__\b", file.read_text(), re.MULTILINE) and not is_inner:
            assert path in listed, f"{path} has no page in tools/api_pages.py"
