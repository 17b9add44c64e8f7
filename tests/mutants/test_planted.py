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


def shipped(root: Path) -> dict[Path, str]:
    """The files of the shipped tree."""
    paths = [path for home in HOMES for path in (root / home).rglob("*.py")]
    return {path: path.read_text() for path in paths}


def test_each_fault_can_be_planted() -> None:
    """The text of each fault stands once in the shipped code, so that the list is of today's code."""
    everything = "\0".join(shipped(ROOT).values())
    counts = {mutant.old: everything.count(mutant.old) for mutant in MUTANTS}
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
    [path] = [path for path, text in shipped(tree).items() if mutant.old in text]
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    actual = {name: value for name, value in os.environ.items() if name != "PSFLEET_TORTURE"}
    env = {**actual, "PYTHONPATH": os.pathsep.join(str(tree / home) for home in (".", *HOMES[1:]))}
    process = ended([*command, *mutant.tests.split()], 1800.0, cwd=tree, env=env)
    assert process.returncode == 1, process.stdout[-2000:] + process.stderr[-2000:]
