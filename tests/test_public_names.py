"""Every module has a docstring; public functions and classes too; `__all__` is for public faces."""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

import psfleet

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[1]
NOT_MODULES = {  # generated stubs, and texts from which kernels are generated
    ROOT / "psfleet" / "core" / "net" / "v1",
    ROOT / "psfleet" / "core" / "engine" / "kernels" / "sources",
}
MODULES = sorted(
    path.relative_to(ROOT)
    for folder in ("psfleet", "server", "worker", "launch")
    for path in (ROOT / folder).rglob("*.py")
    if not NOT_MODULES & set(path.parents)
)


FACES = (
    *("psfleet/layers/", "psfleet/fluid/", "psfleet/core/base/errors.py"),
    *(
        "psfleet/clip.py",
        "psfleet/core/engine/schema/entry.py",
        "psfleet/features.py",
        "psfleet/initializer.py",
        "psfleet/regularizer.py",
    ),
    *(
        "psfleet/fleet/callbacks.py",
        "psfleet/fleet/fleet.py",
        "psfleet/fleet/testing/local_fleet.py",
    ),
    *("psfleet/optimizer/rule_optimizers.py", "psfleet/optimizer/dygraph.py"),
    # These hand on a name that they import.
    *("psfleet/data/parquet.py", "psfleet/core/base/arrow.py"),
    *(
        "psfleet/core/engine/runtime_interface.py",
        "psfleet/core/engine/schema/table.py",
        "psfleet/core/runtime/stages.py",
    ),
    *(
        "psfleet/core/base/validation/annotations.py",
        "psfleet/core/net/frame.py",
        "psfleet/core/net/segments.py",
    ),
)
"""Beside each package's `__init__.py`: modules whose names users import, or that other faces list."""


def public(tree: ast.Module) -> list[str] | None:
    """The module's `__all__`; None: it has none, or computes it."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id == "__all__":
                computed = not isinstance(node.value, ast.List)
                return None if computed else list(ast.literal_eval(node.value))
    return None


def order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each by name: the order that ruff would make."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


def definitions(tree: ast.Module) -> list[ast.FunctionDef | ast.ClassDef]:
    """Functions and classes at the top of a module."""
    return [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def wrong(path: Path) -> Iterator[str]:
    """What the module lacks of its promises."""
    tree = ast.parse((ROOT / path).read_text())
    names = public(tree)
    if not ast.get_docstring(tree):
        yield f"{path} has no docstring"
    if names is not None and not str(path).startswith(FACES) and path.name != "__init__.py":
        yield f"{path} has an __all__, which only public faces have"
    if any(a >= b for a, b in itertools.pairwise(map(order, names or ()))):
        yield f"{path}: __all__ is not sorted, or repeats a name"
    for node in definitions(tree):
        is_rule = isinstance(node, ast.FunctionDef) and path.is_relative_to(
            "psfleet/core/engine/rules"
        )
        if not is_rule and not node.name.startswith("_") and not ast.get_docstring(node):
            yield f"{path}: {node.name} has no docstring"


def test_public_names() -> None:
    """A module has a docstring; only a public face has `__all__`, sorted, without repeats; and every public
    function and class says what the caller gets."""
    assert len(MODULES) > 300
    assert [sentence for path in MODULES for sentence in wrong(path)] == []


def test_public_faces_are_attributes_of_the_package() -> None:
    """`import psfleet` suffices for `psfleet.clip.ClipGradByNorm`; modules load when they are first named."""
    folder = ROOT / "psfleet"
    faces = {path.name.removesuffix(".py") for path in folder.iterdir() if path.name[0] not in "_."}
    faces -= {"core", "py.typed", "torch"}  # `from psfleet import *` must not load PyTorch
    assert faces <= set(psfleet.__all__)
    assert "torch" not in psfleet.__all__
    assert psfleet.clip.__name__ == "psfleet.clip"
