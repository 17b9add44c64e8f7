"""Imports point one way: packages form layers, and programs stand on the library."""

import ast
import collections
import sys
import tomllib

import pytest

from tests.programs import ended
from tools.rooms import (
    EXCEPTIONS,
    FLOORS,
    HOMES,
    MODULES,
    ROOT,
    circles,
    imported,
    uses,
    wrong_imports,
)

# The packages of each program from the ground up, for imports run one way there too.
LAYERS = {
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
        "observability",
        "console",
        "chaos",
        "engines",
        "agent job_runner",
        "commands",
        "__main__",
    ],
}


def part(module: str) -> tuple[str, str]:
    """The program and the package in it: `psfleet_server.rpc.replies` is in psfleet_server, rpc."""
    home, _, rest = module.partition(".")
    return home, rest.partition(".")[0]


@pytest.mark.parametrize("package", HOMES)
def test_imports_run_one_way(package: str) -> None:
    """The library imports none of the programs, and a program none of the others."""
    files = list(HOMES[package].rglob("*.py"))
    assert files
    for path in files:
        module = next(name for name, place in MODULES.items() if place == path)
        ours = {
            name.partition(".")[0]
            for name in imported(path)
            if name.startswith("psfleet") and (module, name) not in EXCEPTIONS
        }
        assert ours <= {"psfleet", package}, f"{path.relative_to(ROOT)} imports {sorted(ours)}"


def test_rooms_stand_on_floors() -> None:
    """A room of the library uses rooms below it, and is on one floor; exceptions have a reason and exist."""
    assert not wrong_imports()
    rooms = [room for floor in FLOORS for room in floor]
    assert sorted(rooms) == sorted(uses())
    assert all(other in imported(MODULES[module]) for module, other in EXCEPTIONS)


def test_no_circles() -> None:
    """No files import each other in a circle, be it inside a package or a function, or by importlib."""
    assert not circles()


INNER = [room for floor in FLOORS for room in floor if room.startswith("core.")]


@pytest.mark.parametrize("room", ["data", *INNER])
def test_a_room_says_what_it_uses(room: str) -> None:
    """The docstring of an inner room ends with the rooms that it uses, and no others."""
    path = MODULES[f"psfleet.{room}"]
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    expected = ", ".join(sorted(uses()[room])) or "no other room"
    assert text.rstrip().endswith(f"Uses {expected}."), f"{path} must end with: Uses {expected}."


def test_the_library_is_a_small_house() -> None:
    """`ls psfleet` shows the public names and core, at most sixteen entries."""
    entries = {path.name for path in (ROOT / "psfleet").iterdir() if path.name != "__pycache__"}
    assert len(entries) <= 16


@pytest.mark.parametrize("package", LAYERS)
def test_layers(package: str) -> None:
    """A package of a program imports packages of lower layers only, so there is no circle."""
    layer = {name: i for i, names in enumerate(LAYERS[package]) for name in names.split()}
    seen = set()
    for module, path in MODULES.items():
        home, name = part(module)
        if home != package or not name:
            continue
        seen.add(name)
        for other in imported(path):
            target_home, target = part(other)
            if target_home != package or target in ("", name):
                continue
            assert target in layer, f"{module} imports {other}, which is in no layer"
            assert layer[target] < layer[name], f"{module} imports {other}, which is not below it"
    assert seen == set(layer)


def test_testing_is_for_tests() -> None:
    """No shipped module imports psfleet.fleet.testing, beside that package itself."""
    testing = "psfleet.fleet.testing"
    for module, path in MODULES.items():
        if not module.startswith(testing):
            actual = [name for name in imported(path) if name.startswith(testing)]
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
