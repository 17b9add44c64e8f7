"""The one-way rule of the house: programs stand on the library, never the other way round."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOMES = {"psfleet": ROOT / "psfleet"} | {
    f"psfleet_{role}": ROOT / role / f"psfleet_{role}" for role in ("server", "worker", "launch")
}


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} is a relative import"
            yield node.module or ""


@pytest.mark.parametrize("package", HOMES)
def test_imports_run_one_way(package: str) -> None:
    """The library imports none of the programs, and a program none of the others."""
    files = list(HOMES[package].rglob("*.py"))
    assert files
    for path in files:
        ours = {name.partition(".")[0] for name in imported(path) if name.startswith("psfleet")}
        assert ours <= {"psfleet", package}, f"{path.relative_to(ROOT)} imports {sorted(ours)}"


@pytest.mark.parametrize("package", HOMES)
def test_packages_are_typed(package: str) -> None:
    """Each package tells type checkers that it is annotated."""
    assert (HOMES[package] / "py.typed").exists()


def test_importing_the_library_loads_nothing_heavy() -> None:
    """`import psfleet` costs nothing: neither numba nor gRPC nor NumPy is loaded."""
    program = "import sys, psfleet; print(*({'numba', 'grpc', 'numpy'} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    assert not loaded


def test_a_server_loads_neither_graph_nor_optimizers() -> None:
    """A server process does without the graph, the optimizer wrappers and the fleet API."""
    program = (
        "import sys; sys.path[:0] = ['.', 'server']; import psfleet_server.process; "
        "print(*(m for m in sys.modules if m.startswith(('psfleet.program', "
        "'psfleet.optimizer', 'psfleet.fleet', 'psfleet_launch', 'psfleet_worker'))))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    assert not loaded


def test_everything_is_installed() -> None:
    """Files beside the modules, such as the texts of kernels, are named in the package data."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    for home in HOMES.values():
        files = [
            path for path in home.rglob("*") if path.is_file() and "__pycache__" not in path.parts
        ]
        left_out = [
            path
            for path in files
            if path.suffix != ".py" and not any(path.match(pattern) for pattern in patterns)
        ]
        assert not left_out
        assert all((path.parent / "__init__.py").exists() for path in files)
