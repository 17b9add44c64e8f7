"""Checks the form of docstrings, so that each makes sense without its name, as in an editor's hover.

A docstring begins with a verb (functions) or a noun (classes, attributes), not with a question word, and is
more than a pointer "See X.". A case such as "None: all rows" is a clause ("or None for all rows"). The head
of a module of more than 60 lines has two sentences or more: what the module does, and when a reader would
open it. Only form is checked: whether the sentences help is for a reader to say.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("psfleet", "server", "worker", "launch")
SHORT = 60  # lines of a module whose head may be one sentence
_QUESTION = "What|Who|Whose|Whom|Whoever|Whatever|Whether|Which|Where|When|Why|How|Of"
BEGINNING = re.compile(rf"({_QUESTION}|As)\b")
# An entry of "Args:" may refer to another one with As.
ENTRY = re.compile(rf"\s*\w[\w, ]*: ({_QUESTION})\b")
POINTER = re.compile(r"See \S+\.?")
TELEGRAM = re.compile(r"(?:^\s*|[.;:(] )(None|0|True|False|[Ee]mpty): (?=[a-z])")
SENTENCE = re.compile(r"[.:!?](?=\s|$)")


def complaints(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the fault of each docstring of a module that breaks a rule."""
    tree = ast.parse(source)
    head = ast.get_docstring(tree) or ""
    if source.count("\n") > SHORT and len(SENTENCE.findall(head)) < 2:
        yield 1, f"the head of a module of more than {SHORT} lines has one sentence"
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        text = node.value.value
        if not isinstance(text, str):
            continue
        if POINTER.fullmatch(text.strip()):
            yield node.lineno, f"only points elsewhere: {text.strip()}"
        for number, line in enumerate(text.split("\n"), node.lineno):
            first = number == node.lineno
            if (BEGINNING if first else ENTRY).match(line.lstrip() if first else line):
                yield number, f"begins with a question word: {line.strip()}"
            if TELEGRAM.search(line):
                yield number, f"is a telegram, write a clause: {line.strip()}"


def main() -> int:
    """Print the faults of all modules, and return the exit code."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *(f"{name}/*.py" for name in FOLDERS)],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split()
    faults = [
        f"{name}:{line}: {fault}"
        for name in listed
        if not Path(name).stem.endswith(("_pb2", "_pb2_grpc")) and (ROOT / name).exists()
        for line, fault in complaints((ROOT / name).read_text())
    ]
    print(
        "\n".join(faults) or f"the docstrings of {len(listed)} files have the form that they should"
    )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
