"""Imports point one way: packages form layers, and programs stand on the library."""

import ast
import collections
import statistics
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.programs import ended

ROOT = Path(__file__).resolve().parents[1]
HOMES = {"psfleet": ROOT / "psfleet"} | {
    f"psfleet_{role}": ROOT / role / f"psfleet_{role}" for role in ("server", "worker", "launch")
}


# From the ground up. A package imports packages of lower layers only; CONTRIBUTING.md says what each is.
LAYERS = {
    "psfleet": [
        "errors",
        "settings validation",
        "consistency faults observability stages",
        "platform rules",
        "entry http2",
        "schema",
        "formats initializer kernels regularizer",
        "runtime",
        "parameters strategy tables",
        "feature_sets",
        "datasets metrics",
        "program shard",
        "wire",
        "checkpoint layers",
        "chaos embedded",
        "execution mode_runtimes",
        "optimizer prediction testing",
        "serving",
        "client fleet",
        "fluid torch",
        "__main__",
    ],
    "psfleet_server": [
        "coordinator rpc",
        "durability",
        "engine",
        "snapshots standby",
        "server_metrics",
        "services",
        "process",
        "__main__",
    ],
    "psfleet_worker": [
        "session stage_links worker_metrics",
        "connection",
        "data_client snapshot_marks tensors",
        "cluster_runtime reader_runtime",
    ],
    "psfleet_launch": [
        "job prediction_job",
        "supervision",
        "console observability",
        "chaos",
        "engines",
        "agent job_runner",
        "commands",
        "__main__",
    ],
}
# Names that scripts import. No package imports them, but for the older face, which hands them on.
FACES = {"clip", "features"}

FILES = 467

MODULES = {
    ".".join(path.relative_to(home.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for home in HOMES.values()
    for path in home.rglob("*.py")
}


@cache
def imported(path: Path) -> list[str]:
    """The modules that a file imports, wherever in it."""
    return [*_imported(path)]


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} is a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module or ""


def part(module: str) -> tuple[str, str]:
    """The program or library and the package in it: `psfleet.core.engine.tables.sparse` is in psfleet,
    tables."""
    home, _, rest = module.partition(".")
    return home, rest.partition(".")[0]


@pytest.mark.parametrize("package", HOMES)
def test_imports_run_one_way(package: str) -> None:
    """The library imports none of the programs, and a program none of the others."""
    files = list(HOMES[package].rglob("*.py"))
    assert files
    for path in files:
        ours = {name.partition(".")[0] for name in imported(path) if name.startswith("psfleet")}
        assert ours <= {"psfleet", package}, f"{path.relative_to(ROOT)} imports {sorted(ours)}"


@pytest.mark.parametrize("package", HOMES)
def test_layers(package: str) -> None:
    """A package imports packages of lower layers only, so there is no circle; faces are for scripts."""
    layer = {name: i for i, names in enumerate(LAYERS[package]) for name in names.split()}
    seen = set()
    for module, path in MODULES.items():
        home, name = part(module)
        if home != package or not name or (home == "psfleet" and name in FACES):
            continue
        seen.add(name)
        for other in imported(path):
            target_home, target = part(other)
            if target_home != package or target in ("", name):
                continue
            if package == "psfleet" and target in FACES and name in ("fluid", "serving"):
                continue
            assert target in layer, f"{module} imports {other}, which is in no layer"
            assert layer[target] < layer[name], f"{module} imports {other}, which is not below it"
    assert seen == set(layer)


def test_testing_is_for_tests() -> None:
    """No shipped module imports psfleet.fleet.testing."""
    for module, path in MODULES.items():
        if part(module) != ("psfleet", "testing"):
            actual = [name for name in imported(path) if part(name) == ("psfleet", "testing")]
            assert not actual, f"{module} imports {actual}"


def test_modules_have_names_of_their_own() -> None:
    """A file picker tells modules apart by name; the same name means the same subject on two levels."""
    modules = collections.defaultdict(set)
    for module in MODULES:
        home, _, name = module.rpartition(".")
        modules[name].add(home)
    allowed = [
        {
            "psfleet.core.engine.kernels",
            "psfleet.core.engine.tables",
            "psfleet.core.engine.kernels.sources",
        },  # a kernel and its text
        {"psfleet.core.engine.rules", "psfleet.optimizer"},
        {"psfleet.layers", "psfleet.core.graph.program.ops"},
        {"psfleet.core.engine.shard", "psfleet.core.runtime.strategy"},
        {"psfleet", "psfleet.optimizer"},
        {"psfleet.fluid", "psfleet.fluid.static"},
    ]
    for name, homes in modules.items():
        if name in ("__main__", "v1") or len(homes) == 1 or name == name.upper():
            continue
        packages = {path for path in homes if MODULES[f"{path}.{name}"].name == "__init__.py"}
        files = homes - packages
        if len(files) > 1:
            assert any(files <= pair for pair in allowed), f"{name} is in {sorted(files)}"


@pytest.mark.parametrize("package", HOMES)
def test_packages_are_typed(package: str) -> None:
    """Each package tells type checkers that it is annotated."""
    assert (HOMES[package] / "py.typed").exists()


def test_importing_the_library_loads_nothing_heavy() -> None:
    """`import psfleet` costs nothing: neither numba nor gRPC nor NumPy is loaded."""
    program = "import sys, psfleet; print(*({'numba', 'grpc', 'numpy'} & set(sys.modules)))"
    loaded = ended([sys.executable, "-c", program], check=True, cwd=ROOT).stdout.strip()
    assert not loaded


def test_a_server_loads_neither_graph_nor_optimizers() -> None:
    """A server process does without the graph, the optimizer wrappers and the fleet API."""
    program = (
        "import sys; sys.path[:0] = ['.', 'server']; import psfleet_server.process; "
        "print(*(m for m in sys.modules if m.startswith(('psfleet.core.graph.program', "
        "'psfleet.optimizer', 'psfleet.fleet', 'psfleet_launch', 'psfleet_worker'))))"
    )
    loaded = ended([sys.executable, "-c", program], check=True, cwd=ROOT).stdout.strip()
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


def test_files_and_functions_are_short() -> None:
    """No file has more than 450 lines but generated ones, and half of the shipped functions at most 8."""
    folders = [
        *HOMES.values(),
        *(ROOT / name for name in ("tests", "examples", "benchmarks", "tools")),
    ]
    files = [path for folder in folders for path in folder.rglob("*.py") if "_pb2" not in path.name]
    assert not [str(path) for path in files if len(path.read_text().splitlines()) > 450]
    functions = [
        node.end_lineno - node.lineno + 1
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno
    ]
    assert statistics.median(functions) <= 8


def test_folders_and_the_tree_are_small() -> None:
    """A folder of the shipped tree has at most 20 modules, and the tree at most FILES; what is read together
    is in one file. Generated messages do not count."""
    files = [path for path in MODULES.values() if path.parent.name != "v1"]
    folders = collections.Counter(path.parent for path in files)
    assert not {folder: count for folder, count in folders.items() if count > 20}
    assert len(files) <= FILES
