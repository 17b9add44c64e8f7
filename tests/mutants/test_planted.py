"""Tests notice faults of one line in what keeps a fleet exact."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.mutants.planted import MUTANTS, Mutant
from tests.programs import ended

ROOT = Path(__file__).resolve().parents[2]
HOMES = ("psfleet", "server", "worker", "launch")


def places(root: Path, text: str) -> list[Path]:
    """The files of the shipped tree with this text, once for each time that it stands there."""
    files = [path for home in HOMES for path in (root / home).rglob("*.py")]
    return [path for path in files for _ in range(path.read_text().count(text))]


def test_each_fault_can_be_planted() -> None:
    """The text of each fault stands once in the shipped code, so that the list is of today's code."""
    assert len(MUTANTS) >= 60
    counts = {mutant.old: len(places(ROOT, mutant.old)) for mutant in MUTANTS}
    assert counts == dict.fromkeys(counts, 1)


@pytest.mark.skipif("PSFLEET_TORTURE" not in os.environ, reason="make torture plants each fault")
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.old for mutant in MUTANTS])
def test_a_planted_fault_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    """The tests that a fault names fail in a copy of the tree that has it."""
    tree = tmp_path / "tree"
    for folder in (*HOMES, "tests", "examples"):
        shutil.copytree(ROOT / folder, tree / folder)  # with its bytecode, which is still valid
    shutil.copy(ROOT / "pyproject.toml", tree)
    [path] = places(tree, mutant.old)
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    actual = {name: value for name, value in os.environ.items() if name != "PSFLEET_TORTURE"}
    env = {**actual, "PYTHONPATH": os.pathsep.join(str(tree / home) for home in (".", *HOMES[1:]))}
    process = ended([*command, *mutant.tests.split()], 1800.0, cwd=tree, env=env)
    assert process.returncode == 1, process.stdout[-2000:] + process.stderr[-2000:]
