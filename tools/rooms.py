"""Defines the rooms of psfleet/, its packages, and which of them may import which.

A room is a public package or module of `psfleet/`, or a package of `psfleet/core/`. Rooms are on floors: a
room may import only rooms of lower floors. `tests/test_layout.py` checks that, `draw_diagrams.py` draws it.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOMES = {"psfleet": ROOT / "psfleet"} | {
    f"psfleet_{role}": ROOT / role / f"psfleet_{role}" for role in ("server", "worker", "launch")
}

# Lowest floor first. Each room has a few words about its contents, for the diagram.
FLOORS: list[dict[str, list[str]]] = [
    {"core.base": ["errors, settings, argument checks,", "files, threads, logs, metrics"]},
    {"core.engine": ["rules, kernels, tables, shard:", "the parameter server without I/O"]},
    {
        "core.net": ["frames, messages, HTTP/2,", "TLS, shared memory"],
        "initializer": ["first values"],
        "regularizer": ["L1, L2"],
    },
    {"data": ["readers, batches, features"]},
    {"checkpoint": ["snapshots on disk"], "metrics": ["AUC, log loss, ..."]},
    {"core.runtime": ["a script's way to its tables:", "embedded, modes, strategies"]},
    {"core.graph": ["programs, operations,", "execution, pipelines"]},
    {
        "layers": ["building blocks", "of programs"],
        "optimizer": ["optimizers and", "their wrappers"],
    },
    {"clip": ["gradient clipping"], "features": ["feature sets,", "from TOML too"]},
    {"serving": ["prediction without", "a fleet"]},
    {"core.client": ["psfleet.connect()"], "fleet": ["roles, data,", "saving, testing"]},
    {"fluid": ["the older API"], "torch": ["PyTorch models"]},
]

# Imports of a room on the same or a higher floor, each with its reason. All are inside a function, by name.
EXCEPTIONS = {
    ("psfleet.core.runtime.strategy.distributed_strategy", "psfleet.fleet"): (
        "an optimizer that is given a strategy asks the process's fleet which settings count"
    ),
    ("psfleet.serving.prediction", "psfleet.torch.conversion"): (
        "a saved PyTorch model needs PyTorch, which other models do not"
    ),
    ("psfleet.serving.model_export", "psfleet.torch.onnx_modules"): (
        "a PyTorch model is exported by PyTorch, which other models do not need"
    ),
    ("psfleet.core.base.crash_points", "psfleet_launch.chaos.injection"): (
        "workers and servers of a job under --chaos inject faults, which no other process loads"
    ),
    ("psfleet.fleet.testing.server_thread", "psfleet_server.process"): (
        "a LocalFleet runs real servers, which are a program and no part of the library"
    ),
}

MODULES = {
    ".".join(path.relative_to(home.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for home in HOMES.values()
    for path in sorted(home.rglob("*.py"))
}


def room_of(module: str) -> str:
    """Return the room of a module, such as `core.engine` or `optimizer`; "" for `psfleet` itself."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2] if parts[:1] == ["core"] else parts[:1])


@cache
def imported(path: Path) -> Mapping[str, bool]:
    """Return the modules that a file imports anywhere, with True for those that only type checkers import.

    Calls of `importlib.import_module` with a literal name are included.
    """
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for_types_only: dict[str, bool] = {}
    for node in ast.walk(tree):
        for name in _imported(node):
            for_types_only[name] = for_types_only.get(name, True) and id(node) in for_types
    return for_types_only


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, f"line {node.lineno} is a relative import"
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            yield name if name in MODULES else node.module or ""
    elif (
        isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "import_module"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ):
        yield str(node.args[0].value)


def uses() -> dict[str, set[str]]:
    """Return for each room the rooms that it imports, without those of `EXCEPTIONS`."""
    rooms: dict[str, set[str]] = {room: set() for floor in FLOORS for room in floor}
    for module, path in MODULES.items():
        importer = room_of(module)
        if not module.startswith("psfleet.") or importer in ("", "core"):
            continue
        for imported_module in imported(path):
            is_ours = (
                imported_module.partition(".")[0] == "psfleet"
                and (module, imported_module) not in EXCEPTIONS
            )
            if is_ours and room_of(imported_module) not in ("", importer):
                rooms.setdefault(importer, set()).add(room_of(imported_module))
    return rooms


def wrong_imports() -> list[str]:
    """Return a sentence for each import of a room that is not on a lower floor than the importing room."""
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    return [
        f"psfleet.{room} imports psfleet.{imported_room}, which is not on a lower floor (tools/rooms.py)"
        for room, imports in uses().items()
        for imported_room in sorted(imports)
        if floor.get(imported_room, 99) >= floor.get(room, -1)
    ]


def circles() -> list[list[str]]:
    """Return the groups of modules that import each other in a circle at run time.

    All four packages are searched: library, server, worker and launcher. Imports for type checkers do not
    count.
    """
    edges = {
        module: [
            other
            for other, for_types in imported(path).items()
            if other in MODULES and not for_types and (module, other) not in EXCEPTIONS
        ]
        for module, path in MODULES.items()
    }
    return [sorted(group) for group in _strongly_connected(edges) if len(group) > 1]


def _strongly_connected(edges: Mapping[str, list[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in edges[module]:
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            at = stack.index(module)
            groups.append(stack[at:])
            del stack[at:]

    for module in edges:
        if module not in order:
            visit(module)
    return groups
