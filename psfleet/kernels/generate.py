"""From a rule to its kernels: the rule's source text goes into a template, the template to a file."""

import re
from functools import cache
from pathlib import Path
from types import ModuleType

from psfleet.kernels.cache import load_text

__all__ = ["static_kernels", "width_kernels"]

_SOURCES = Path(__file__).parent / "sources"


@cache
def static_kernels(name: str) -> ModuleType:
    """The kernels of `sources/<name>.py`, which depend on no rule and no width."""
    return load_text(name, _source(name))


@cache
def width_kernels(name: str, dim: int) -> ModuleType:
    """The kernels of `sources/<name>.py` for rows of `dim` values, a constant to the compiler."""
    return load_text(f"{name}_{dim}", _set(_source(name), "DIM", dim))


def _source(name: str) -> str:
    return (_SOURCES / f"{name}.py").read_text()


def _set(text: str, constant: str, value: int) -> str:
    """The text with the line `constant = ...` changed."""
    changed, count = re.subn(rf"(?m)^{constant} = .*$", f"{constant} = {value}", text)
    assert count == 1, f"the template defines {constant} {count} times"
    return changed
