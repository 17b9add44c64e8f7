"""Docstrings begin with a verb (functions) or a noun (classes, attributes), not with a question word."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "What|Who|Whose|Whom|Whoever|Whatever|Whether|Which|Where|When|Why|How|Of"
FIRST = re.compile(rf"({QUESTION}|As)\b")
ENTRY = re.compile(rf"\s*\w[\w, ]*: ({QUESTION})\b")
"""An entry may refer to another one with As."""


def beginnings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line of each docstring, and its entries of arguments and attributes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                first, *others = text.split("\n")
                if FIRST.match(first.lstrip()):
                    yield node.lineno, first
                for number, line in enumerate(others, node.lineno + 1):
                    if ENTRY.match(line):
                        yield number, line.strip()


def test_a_question_word_is_found() -> None:
    """The first word of a docstring and of an entry is looked at, and no other word."""
    source = '"""What is.\n\nArgs:\n    n: How many.\n    m: Number of those who read what is there.\n"""\n'
    assert list(beginnings(source)) == [(1, "What is."), (4, "n: How many.")]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """A reader learns from the first word what a function does or a value is."""
    paths = [
        path
        for path in (ROOT / "psfleet").rglob("*.py")
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    ]
    actual = [
        f"{path.relative_to(ROOT)}:{number}: {text}"
        for path in paths
        for number, text in beginnings(path.read_text())
    ]
    assert paths
    assert not actual, "\n".join(actual)
