"""Nothing that psfleet reads can run code: no unpickling, anywhere, and none in what it could call."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("psfleet", "server", "worker", "launch", "examples", "benchmarks", "tools")
PICKLERS = "_pickle cloudpickle cPickle dill joblib jsonpickle marshal pickle shelve"
BANNED_MODULES = {
    *PICKLERS.split(),
    "multiprocessing",  # its queues and pipes unpickle
    "pandas",  # read_pickle, and read_hdf that unpickles
    "yaml",  # yaml.load makes objects; nothing here needs it
}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
ALLOWED_CALLS = {
    # Kernels are text of psfleet's own, written to modules that numba's cache can find.
    "psfleet/core/engine/kernels": {"exec", "compile"},
    # A user's script is compiled to find its syntax errors before servers start; nothing of it runs.
    "launch/psfleet_launch/job/start_checks.py": {"compile"},
    "psfleet/fleet/testing/rule_conformance.py": {
        "compile"
    },  # text of a CUDA kernel, which does not run
}


def sources() -> Iterator[tuple[str, ast.AST]]:
    """Every module that is shipped, with its name."""
    for folder in FOLDERS:
        # Others' packages.
        paths = (p for p in (ROOT / folder).rglob("*.py") if ".venv" not in p.parts)
        for path in sorted(paths):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(), str(path))


def findings(name: str, tree: ast.AST) -> Iterator[str]:
    """What in a module could unpickle or run text."""
    allowed = next((calls for at, calls in ALLOWED_CALLS.items() if name.startswith(at)), set())
    for node in ast.walk(tree):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.partition(".")[0] in BANNED_MODULES:
                        yield f"{where} imports {alias.name}"
            case ast.ImportFrom(module=str(module)):
                if module.partition(".")[0] in BANNED_MODULES:
                    yield f"{where} imports from {module}"
            case ast.Call(func=ast.Name(id=called)) if called in BANNED_CALLS - allowed:
                yield f"{where} calls {called}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=attr)):
                yield from (f"{where} {what}" for what in _loads(module, attr, node))
            case ast.Attribute(attr="__reduce__" | "__reduce_ex__" | "__setstate__" as attr):
                yield f"{where} names {attr}"


def _loads(module: str, attr: str, call: ast.Call) -> Iterator[str]:
    said = {word.arg: word.value for word in call.keywords}
    value = {arg: node.value for arg, node in said.items() if isinstance(node, ast.Constant)}
    if module == "torch" and attr == "load" and value.get("weights_only") is not True:
        yield "calls torch.load without weights_only=True"
    if module in ("np", "numpy") and "allow_pickle" in said and value.get("allow_pickle", True):
        yield f"calls numpy.{attr} with allow_pickle"
    if attr in ("send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized"):
        yield f"calls {attr}, which pickles"


@pytest.mark.long
def test_nothing_unpickles() -> None:
    """No module that is shipped imports or calls what unpickles, or runs text that it has read."""
    actual = [finding for name, tree in sources() for finding in findings(name, tree)]
    assert actual == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from multiprocessing import shared_memory",
        "import joblib.parallel",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=choice)",
        "socket.recv_pyobj()",
        "eval(text)",
        "class A:\n    x = A.__reduce__",
    ],
)
def test_the_scan_finds_what_it_looks_for(text: str) -> None:
    """Each kind of thing, or the test above would prove nothing."""
    assert list(findings("psfleet/x.py", ast.parse(text)))
