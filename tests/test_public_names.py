"""What every module promises: a docstring, and its public names in one sorted list."""

import ast
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_MODULES = {  # generated stubs, and texts from which kernels are generated
    ROOT / "psfleet" / "wire" / "v1",
    ROOT / "psfleet" / "kernels" / "sources",
}
MODULES = sorted(
    path.relative_to(ROOT)
    for folder in ("psfleet", "server", "worker", "launch")
    for path in (ROOT / folder).rglob("*.py")
    if not NOT_MODULES & set(path.parents)
)


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


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_public_names(path: Path) -> None:
    """A module that defines anything has `__all__`: sorted, without repeats."""
    tree = ast.parse((ROOT / path).read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"
    names = public(tree)
    if names is None:
        assert not definitions(tree), f"{path} has no __all__"
        return
    keys = [order(name) for name in names]
    assert all(a < b for a, b in itertools.pairwise(keys)), f"{path}: __all__ is not sorted"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_public_definitions_have_docstrings(path: Path) -> None:
    """Every public function and class says what the caller gets."""
    tree = ast.parse((ROOT / path).read_text())
    bare = [
        node.name
        for node in definitions(tree)
        if node.name in (public(tree) or ()) and not ast.get_docstring(node)
    ]
    assert not bare, f"{path}: no docstring: {bare}"
