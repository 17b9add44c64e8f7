"""tools/check_docstrings.py, which `make check` runs, finds each fault of form and nothing else."""

import runpy
from pathlib import Path

TOOL = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "check_docstrings.py"))


def faults(source: str) -> list[tuple[int, str]]:
    return [(line, fault.partition(":")[0]) for line, fault in TOOL["complaints"](source)]


def test_each_fault_of_form_is_found() -> None:
    """Question words, pointers, telegrams and heads of one sentence are found; good docstrings pass."""
    entries = "    n: How many.\n    m: Number of those who read.\n    k: Rows. 0: all.\n"
    source = f'"""What is.\n\nArgs:\n{entries}"""\n'
    assert faults(source) == [
        (1, "begins with a question word"),
        (4, "begins with a question word"),
        (6, "is a telegram, write a clause"),
    ]
    assert faults('def f():\n    """See Runtime.pull."""\n') == [(2, "only points elsewhere")]
    good = '"""Sums of rows. Server 0: the one that counts.\n\nUse it for {None: all}."""\n'
    assert faults(good + "\n" * 60) == []
    long = faults('"""Sums of rows."""\n' + "\n" * 60)
    assert long == [(1, "the head of a module of more than 60 lines has one sentence")]
