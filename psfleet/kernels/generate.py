"""From a rule to its kernels: the rule's source text goes into a template, the template to a file."""

from pathlib import Path
from types import ModuleType

from psfleet.kernels.cache import load_text

__all__ = ["static_kernels"]

_SOURCES = Path(__file__).parent / "sources"


def static_kernels(name: str) -> ModuleType:
    """The kernels of `sources/<name>.py`, which depend on no rule and no width."""
    return load_text(name, (_SOURCES / f"{name}.py").read_text())
