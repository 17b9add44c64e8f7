"""Generated modules: vectorised, cached, private, safe beside each other."""

import ast
import fcntl
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba import njit

from psfleet.core.engine.kernels.cache import (
    _HELPERS,
    _name_of,
    _surroundings,
    cache_folder,
    load_in_any_order,
    load_text,
    short_rows,
    without_comments,
)
from psfleet.core.engine.kernels.generate import dense_kernels, sparse_kernels
from psfleet.core.engine.kernels.intrinsics import OPTIONS
from psfleet.core.engine.rules import ASGD, RULES, Ftrl, RMSProp, Rule
from tests.programs import ended

ROOT = Path(__file__).parents[2]
RULE_CASES = {
    **{name: rule() for name, rule in RULES.items()},
    "centered": RMSProp(centered=True),
    "asgd_of_3": ASGD(3),
    "ftrl_l1": Ftrl(0.1, 0.1),
}


WIDE = pytest.mark.skipif(
    not re.search(r"\+avx2\b", _surroundings()),
    reason="this processor has neither AVX2 nor AVX-512",
)


def machine_code(kernel: Any) -> str:
    """The text of a kernel's code; what comes from the cache has none and is compiled again."""
    if any(kernel.stats.cache_hits.values()):
        options: dict[str, Any] = OPTIONS
        with short_rows():
            kernel = njit(kernel.nopython_signatures[0], **options)(kernel.py_func)
    code: str = next(iter(kernel.inspect_asm().values()))
    return code


@WIDE
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("adam", "lamb", "sgd") else pytest.param(name, marks=pytest.mark.long)
        for name in RULE_CASES
    ],
)
def test_dense_kernel_is_vectorised(name: str) -> None:
    """The machine code of every rule's dense kernel works on whole vector registers."""
    rule: Rule = RULE_CASES[name]
    code = machine_code(dense_kernels(rule, False, False).push)
    wide = [line for line in code.splitlines() if re.search(r"\bv\w+ps\b.*%[yz]mm", line)]
    assert len(wide) >= 4, f"only {len(wide)} vector instructions"
    assert not re.search(r"\bv(div|sqrt|mul|add)sd\b", code) or rule.unit != "element"


@WIDE
@pytest.mark.parametrize(
    "name",
    ["adam", *(pytest.param(name, marks=pytest.mark.long) for name in ("ftrl", "rowwise_adagrad"))],
)
def test_short_rows_are_vectorised(name: str) -> None:
    """A row of 8 is one vector: no weight has a division or a root of its own.

    What is left of them belongs to the row: a rule's combined numbers.
    """
    code = machine_code(sparse_kernels(RULE_CASES[name], False, False, 8, False).push)
    wide = re.findall(r"\bv(?:div|sqrt)ps\b.*%ymm", code)
    single = re.findall(r"\bv(?:div|sqrt)ss\b", code)
    assert wide
    assert len(single) < 8, f"{len(single)} divisions and roots of single numbers"


PROGRAM = """
import numpy as np
from psfleet.core.engine.kernels.generate import dense_kernels
from psfleet.core.engine.rules import SGD, Adagrad, Momentum
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.schema.table import TableSpec
total = compiled = 0
for rule in (SGD(), Adagrad(), Momentum()):
    table = DenseTable(TableSpec("t", "dense", (9,), rule), np.ones(9, np.float32))
    table.push(np.ones(9, np.float32), 0.1)
    total += float(table.state()[0].sum())
    compiled += sum(dense_kernels(rule, False, False).push.stats.cache_misses.values())
print(total, compiled)
"""


def start(cache: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PSFLEET_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[str, int]:
    """The sum of the weights, and how many kernels were compiled."""
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    total, compiled = output.split()
    return total, int(compiled)


@pytest.mark.long
@pytest.mark.timeout(900)  # four interpreters
def test_one_of_several_processes_compiles(tmp_path: Path) -> None:
    """Of processes that start together on an empty cache one compiles each kernel, and they agree; the next
    finds everything compiled. Half a file in the cache costs a compilation, not the start of a server."""
    cache = tmp_path / "kernels"
    (expected, first), (other, second) = map(finish, [start(cache) for _ in range(2)])
    assert other == expected
    assert first + second == 3
    assert finish(start(cache)) == (expected, 0)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert not list(cache.glob("*.part"))
    damaged = (("sgd*.nbi", b"\x80half"), ("adagrad*.nbc", b""), ("momentum*.py", b""))
    for pattern, content in damaged:
        [file] = cache.rglob(f"psfleet_kernel_dense_{pattern}")
        file.write_bytes(content)
    assert finish(start(cache))[0] == expected


def test_what_another_process_compiles_is_loaded_last(tmp_path: Path) -> None:
    """Of several kernels those that nobody compiles come first, and then the others, once they are there."""
    first, second = f"value = '{tmp_path} 1'", f"value = '{tmp_path} 2'"
    held = os.open(cache_folder() / f"{_name_of('first', first)}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    loaded: list[str] = []

    def load(stem: str, text: str) -> None:
        if stem == "second":
            fcntl.flock(held, fcntl.LOCK_UN)  # the other one is done
        loaded.append(load_text(stem, text).value)

    try:
        load_in_any_order(lambda: load("first", first), lambda: load("second", second))
    finally:
        os.close(held)
    assert loaded == [f"{tmp_path} 2", f"{tmp_path} 1"]


def test_a_folder_that_others_may_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machine code is not loaded from where others could put it."""
    tmp_path.chmod(0o777)
    monkeypatch.setenv("PSFLEET_CACHE", str(tmp_path))
    folder = cache_folder.__wrapped__()
    assert folder != tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()


def test_an_edited_rule_is_another_module(tmp_path: Path) -> None:
    """The cache does not serve the code of a rule that has since been changed."""
    program = """
import importlib.util, pathlib, re, sys
import numpy as np
from psfleet.core.engine.rules import momentum
source = pathlib.Path(momentum.__file__).read_text()
for sign, name in (("-", "minus"), ("+", "plus")):
    file = pathlib.Path(sys.argv[1]) / "edited.py"
    edited = re.sub('name = "([a-z_]+)"', f'name = "\\\\1_{name}"', source)
    file.write_text(edited.replace("(w - h[0] * g,)", f"(w {sign} h[0] * g,)"))
    spec = importlib.util.spec_from_file_location("edited" + sign, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import linecache
    linecache.clearcache()
    from psfleet.core.engine.tables.dense import DenseTable
    from psfleet.core.engine.schema.table import TableSpec
    table = DenseTable(TableSpec("t", "dense", (1,), module.SGD()), np.zeros(1, np.float32))
    table.push(np.ones(1, np.float32), 1.0)
    print(table.state()[0][0])
"""
    run = ended(
        [sys.executable, "-c", program, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert run.stdout.split() == ["-1.0", "1.0"], run.stderr


DOCUMENTED = '''"""Module."""
import math

# Sum.
def add(a, b):
    """Add."""
    return a + b  # rounded
'''
BARE = "import math\ndef add(a, b):\n    return a + b\n"


def test_an_edited_comment_is_the_same_module() -> None:
    """Comments, docstrings and line numbers of a text and its helpers are not in the cache's key; code is."""
    module = load_text("comments", DOCUMENTED, DOCUMENTED)
    assert load_text("comments", BARE, BARE) is module
    assert load_text("comments", BARE.replace("+", "-"), BARE) is not module
    assert load_text("comments", BARE, BARE.replace("+", "-")) is not module


def test_the_code_of_kernels_is_written_unchanged() -> None:
    """The file that numba compiles has the statements of the text, in the same order."""
    folder = ROOT / "psfleet" / "core" / "engine" / "kernels"
    paths = [*folder.glob("*.py"), *folder.glob("sources/*.py"), *folder.glob("device/*.py")]
    for path in paths:
        text = path.read_text()
        assert statements_of(without_comments(text)) == statements_of(text), path.name
        if path.name in _HELPERS or path.parent.name == "sources":
            bare = without_comments(text).rstrip("\n")
            assert not re.search(r"^\s*(#|$)", bare or "pass", re.MULTILINE), path.name


class WithoutStrings(ast.NodeTransformer):
    """Removes statements that do nothing."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_string = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_string else node

    def visit_Pass(self, node: ast.Pass) -> None:
        return None


def statements_of(text: str) -> str:
    return ast.dump(WithoutStrings().visit(ast.parse(text)))


def test_the_cache_knows_every_helper() -> None:
    """Machine code is found by a hash of all source that it was compiled from: an edit of a module that any
    kernel text imports, or that such a module imports, gives another hash."""
    folder = ROOT / "psfleet" / "core" / "engine" / "kernels"
    imports = re.compile(r"^from psfleet\.core\.engine\.kernels\.(\w+) import", re.MULTILINE)
    sources = [path for path in (folder / "sources").iterdir() if path.is_file()]
    texts = [path.read_text() for path in sources if not path.name.startswith("device_")]
    texts.append((folder / "rule_source.py").read_text())
    needed: set[str] = set()
    while texts:
        for name in imports.findall(texts.pop()):
            if name not in needed:
                needed.add(name)
                texts.append((folder / f"{name}.py").read_text())
    assert {f"{name}.py" for name in needed} == set(_HELPERS)
