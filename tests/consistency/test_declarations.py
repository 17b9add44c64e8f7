"""A consistency mode is declared in one file, and nothing else knows its name."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from psfleet.core.base.errors import ConfigError, FrameError
from psfleet.core.engine.consistency import MODES, ConsistencyMode, find_mode, register
from psfleet.core.net.membership_messages import read_mode
from psfleet.core.net.v1 import shard_pb2
from psfleet.core.runtime.strategy import ConsistencySettings

ROOT = Path(__file__).resolve().parents[2]
DECLARING = {
    ROOT / "psfleet/core" / path for path in ("engine/consistency.py", "base/settings/kinds.py")
}
HOMES = ("psfleet", "server", "worker", "launch")
SHIPPED = {path for home in HOMES for path in (ROOT / home).rglob("*.py")} - DECLARING


def decided(tree: ast.Module) -> Iterator[ast.expr | None]:
    """Expressions that code decides by: compared, matched, in a collection or a key of a table."""
    lists = {
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    }
    for node in ast.walk(tree):
        match node:
            case ast.Compare():
                yield from (node.left, *node.comparators)
            case ast.MatchValue():
                yield node.value
            case ast.Dict():
                yield from node.keys
            case ast.Tuple() | ast.Set() | ast.List() if node not in lists:
                yield from node.elts


@pytest.mark.long
def test_no_code_decides_by_the_name_of_a_mode() -> None:
    """It asks for properties of the mode's declaration."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} decides by the mode {node.value!r}"
        for path in SHIPPED
        for node in decided(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in MODES
    ]
    assert not found


def test_numbers_are_those_of_the_protocol() -> None:
    """Each mode has its number in protos/, and messages give the mode back."""
    named = {
        name.lower().removeprefix("mode_").replace("_", "-"): n
        for name, n in shard_pb2.Mode.items()
    }
    assert named.pop("unspecified") == find_mode(None).number == 0
    assert named == {name: mode.number for name, mode in MODES.items()}
    for name, mode in MODES.items():
        assert read_mode(mode.number) == name
    with pytest.raises(FrameError, match=r"mode 99 is unknown; this server knows sync \(1\)"):
        read_mode(99)


def test_defaults_of_other_modes_may_be_said() -> None:
    """Only another value is a contradiction; an unknown name is refused."""
    assert ConsistencySettings("sync", k_steps=10) == ConsistencySettings("sync")
    assert ConsistencySettings("sync").k_steps == 10
    with pytest.raises(ConfigError, match="no setting 'speed'; it has staleness, k_steps"):
        ConsistencySettings("geo", speed=3)


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("geo", 1000, "'geo' is psfleet.core.engine.consistency.GeoMode"),
        ("mine", 2, "'async' is psfleet.core.engine.consistency.AsyncMode with the number 2"),
        ("My Mode", 1000, "a name has lower-case letters"),
        ("mine", 0, "a number is at least 1"),
    ],
)
def test_modes_that_cannot_be(name: str, number: int, words: str) -> None:
    """A name or number that is none, or that another mode has, is refused; nothing is registered."""
    before = dict(MODES)

    @dataclass(frozen=True)
    class Mine(ConsistencyMode):
        """A mode."""

    Mine.name, Mine.number = name, number
    with pytest.raises(ConfigError, match=words):
        register(Mine)
    assert before == MODES


def test_a_mode_that_nobody_has_declared() -> None:
    """The advice is what makes a mode of one's own known; `--mode` takes psfleet's modes only."""
    advice = r"mode is 'quorum'; it must be .*import its module in the script, which names the mode"
    with pytest.raises(ConfigError, match=advice):
        find_mode("quorum")
