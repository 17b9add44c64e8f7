"""Names use the words of docs/glossary.md: one word for a concept, one class for a name."""

import ast
import importlib
import operator
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| \*\*(.+?)\*\* \| (.+?) \| `(.+?)` \| ?(.*?) ?\|$", re.MULTILINE)
FOLDERS = ("psfleet", "server", "worker", "launch", "tests")
PROTO = re.compile(
    r"^\s*(?:message|enum|service|rpc|oneof)\s+(\w+)"
    r"|^\s*(?:repeated |optional )?(?:map<.*>|[\w.]+)\s+(\w+)\s*=\s*\d+|^\s*([A-Z_]+)\s*=\s*\d+",
    re.MULTILINE,
)
ORDINARY = {"counted", "formula", "moment", "moments", "order", "rank", "remembered", "shares"}
"""Words with an ordinary meaning of their own (the order of rows): banned in names of classes."""
REFERENCE_NAMES = {"frequency_half_life", "half_life"}
"""Names of the field that contain a banned word."""
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

REFERENCE = (
    *("psfleet/fluid/", "psfleet/layers/", "psfleet/metrics.py", "psfleet/optimizer/"),
    *("psfleet/core/graph/program/ops/", "psfleet/core/engine/rules/", "psfleet/torch/"),
)
"""Names here are those of the reference, of torch or of the literature, one on each face."""

SHARED = {
    "DenseTable": "the handle that a script has, and what a server holds",
    "SparseTable": "the handle that a script has, and what a server holds",
}
"""Names of two classes that mean the same concept."""


@dataclass(frozen=True)
class Term:
    """A row of the glossary."""

    name: str
    code: str
    banned: tuple[str, ...]


@cache
def terms() -> list[Term]:
    """The glossary's terms."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    return [
        Term(name, code, tuple(banned.split(", ")) if banned else ())
        for name, _, code, banned in ROW.findall(text)
    ]


@cache
def defined(path: Path) -> list[tuple[str, bool]]:
    """Names of classes, functions, parameters, variables and attributes of a module; whether of a class."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef(name=name):
                names.append((name, True))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                names.append((name, False))
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.append((name, False))
    return names


@cache
def classes() -> list[tuple[str, str]]:
    """Every shipped class: its file and its name without a leading underscore."""
    names = []
    for folder in ("psfleet", "server", "worker", "launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            name = str(path.relative_to(ROOT))
            names += [(name, each.lstrip("_")) for each, is_class in defined(path) if is_class]
    return names


def test_the_glossary_is_read() -> None:
    """The table is found, and no term is defined twice."""
    assert len(terms()) >= 50
    assert [name for name, n in Counter(term.name for term in terms()).items() if n > 1] == []


def exists(code: str) -> bool:
    """Whether a dotted name is a module, or leads from one to something in it."""
    parts = code.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        try:
            operator.attrgetter(".".join(parts[end:]))(value) if parts[end:] else value
        except AttributeError:
            return False
        return True
    return False


def test_the_code_of_a_term_exists() -> None:
    """The module, class or method that embodies a term is where the glossary says."""
    assert [term.code for term in terms() if not exists(term.code)] == []


@pytest.mark.long
def test_class_names_have_no_banned_word() -> None:
    """A concept has one word: no class is named with another one."""
    banned = {word for term in terms() for word in term.banned}
    matches = {name for _, name in classes() if banned & set(WORD.findall(name))}
    assert not matches, f"see docs/glossary.md: {sorted(matches)}"


@pytest.mark.long
def test_no_name_has_a_banned_word() -> None:
    """Nor is a function, parameter, variable, attribute, message, field or value of an enum."""
    banned = {word.lower() for term in terms() for word in term.banned} - ORDINARY
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    names = {
        (str(path.relative_to(ROOT)), name)
        for path in paths
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
        for name, _ in defined(path)
    } | {
        (str(path.relative_to(ROOT)), "".join(match.groups("")))
        for path in sorted((ROOT / "protos").rglob("*.proto"))
        for match in PROTO.finditer(re.sub(r"//.*", "", path.read_text()))
    }
    assert len(names) > 10_000
    match = sorted(
        f"{path}: {name}"
        for path, name in names
        if name not in REFERENCE_NAMES and banned & {word.lower() for word in WORD.findall(name)}
    )
    assert not match, f"see docs/glossary.md: {match}"


def test_a_term_is_no_banned_word() -> None:
    """No word is both a term and a synonym that is not to be used."""
    banned = {word.lower() for term in terms() for word in term.banned}
    assert not banned & {term.name for term in terms()}


def test_each_class_name_stands_for_one_class() -> None:
    """A file picker finds one class by its name, but for names of the reference."""
    ours = Counter(name for path, name in classes() if not path.startswith(REFERENCE))
    actual = {name for name, count in ours.items() if count > 1} - SHARED.keys()
    assert not actual, f"defined twice: {sorted(actual)}"
