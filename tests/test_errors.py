"""The tree of errors, as it is drawn, listed and defined."""

import inspect
import re

from psfleet import errors


def defined() -> dict[str, type]:
    """Every class of the module."""
    members = inspect.getmembers(errors, inspect.isclass)
    return {name: cls for name, cls in members if cls.__module__ == errors.__name__}


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
