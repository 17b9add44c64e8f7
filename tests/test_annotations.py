"""Arguments checked from annotations: what each annotation takes, and the sentence about the rest."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict, Unpack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psfleet.core.base.errors import ConfigError, WrongType
from psfleet.core.base.validation import annotations
from psfleet.core.base.validation.annotations import (
    Must,
    NonNegative,
    PositiveInt,
    Range,
    check,
    check_fields,
    checked,
)

pytestmark = pytest.mark.quick

TAKEN: list[tuple[Any, Any, Any]] = [
    (1, float, 1),
    (np.float32(0.5), float, 0.5),
    (np.array([[2.0]]), float, 2.0),
    (4.0, int, 4),
    (np.int64(3), int, 3),
    (np.True_, bool, True),
    ("cos", Literal["cos", "linear"], "cos"),
    (None, float | None, None),
    ((1, 2), Sequence[int], [1, 2]),
    (np.array([1, 2]), Sequence[float], [1, 2]),
    ([0.5, 2], tuple[float, float], (0.5, 2)),
    (len, Callable[[Any], int], len),
    ({"a": 1}, Mapping[str, Any], {"a": 1}),
    ("x", Any, "x"),
    (0, NonNegative, 0),
]
REFUSED: list[tuple[Any, Any, type[ConfigError], str]] = [
    (True, float, WrongType, "is True, it must be a finite number"),
    (math.inf, float, ConfigError, "is inf, it must be a finite number"),
    ("1", float | None, WrongType, "is '1', it must be a finite number or None"),
    (2.5, int, ConfigError, "is 2.5, it must be a whole number"),
    (10**400, int, ConfigError, "it must be a whole number"),
    (1, bool, WrongType, "is 1, it must be True or False"),
    ("up", Literal["cos", "linear"], ConfigError, "is 'up', it must be 'cos' or 'linear'"),
    (-1, NonNegative, ConfigError, "is -1, it must be a finite number of at least 0"),
    (0, PositiveInt, ConfigError, "is 0, it must be a whole number above 0"),
    (1, Annotated[float, Range(0, 1, high_open=True)], ConfigError, r"in \[0, 1\)"),
    (2, Annotated[float, Range(high=1)], ConfigError, "a finite number of at most 1"),
    ("ab", Sequence[str], WrongType, "is 'ab', it must be a list, each a text"),
    ([1, "x"], Sequence[int], WrongType, r"is \[1, 'x'\], it must be a list, each a whole"),
    ("ab", Iterable[Any], WrongType, "is 'ab', it must be a list"),
    (
        [1.0],
        tuple[float, float],
        WrongType,
        "it must be 2 values: a finite number, a finite number",
    ),
    (3, Callable[[], Any], WrongType, "is 3, it must be a function"),
    ([], Mapping[str, Any], WrongType, r"is \[\], it must be a dict"),
    ("", Annotated[str, Must(bool, "a text")], ConfigError, "is '', it must be a text"),
    (3, Exception, WrongType, "is 3, it must be an Exception"),
    ("x" * 900, int, WrongType, r"x{190,196}\.\.\., it must be a whole number"),
]


@pytest.mark.parametrize(("value", "annotation", "expected"), TAKEN)
def test_taken(value: Any, annotation: Any, expected: Any) -> None:
    """A right value comes back in the annotation's own type."""
    actual = check("owner", "name", value, annotation)
    assert actual == expected
    assert type(actual) is type(expected)


@pytest.mark.parametrize(("value", "annotation", "kind", "text"), REFUSED)
def test_refused(value: Any, annotation: Any, kind: type[ConfigError], text: str) -> None:
    """A wrong one is told apart by type and by range, in one sentence."""
    with pytest.raises(kind, match=f"^owner: name .*{text}") as error:
        check("owner", "name", value, annotation)
    assert type(error.value) is kind


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()))
def test_any_value_is_taken_or_refused(value: Any) -> None:
    """Whatever comes, a number within its range comes out, or a ConfigError."""
    for annotation in (float, int, NonNegative, PositiveInt, Annotated[int, Range(-1, 7)]):
        try:
            actual = check("owner", "name", value, annotation)
        except ConfigError:
            continue
        assert math.isfinite(actual)
        assert not isinstance(actual, bool)


class More(TypedDict, total=False):
    """The rest of the arguments of `full`."""

    size: PositiveInt


@checked
def full(rate: NonNegative, verbose: bool = False, **more: Unpack[More]) -> Any:
    """Its arguments."""
    return rate, verbose, more


def test_calls() -> None:
    """Arguments by place, by name and of an annotated `**more` are checked; defaults are not."""
    assert full(np.array(2.0), size=4.0) == (2.0, False, {"size": 4})  # type: ignore[arg-type]
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: full(-1), "full: rate is -1"),
        (lambda: full(1, verbose="no"), "full: verbose is 'no', it must be True or False"),  # type: ignore[arg-type]
        (lambda: full(1, size=0), "full: size is 0"),
        (lambda: full(1, sizes=0), "full has no argument 'sizes'; it has rate, verbose, size"),  # type: ignore[call-arg]
        (lambda: full(), "full: missing a required argument: 'rate'"),  # type: ignore[call-arg]
        (lambda: full(1, False, 3), "full: too many positional arguments"),  # type: ignore[call-arg]
    ]
    for call, text in wrong:
        with pytest.raises(ConfigError, match=text):
            call()


@dataclass(frozen=True)
class Box:
    """A dataclass that checks itself."""

    size: PositiveInt = 1

    def __post_init__(self) -> None:
        check_fields("Box", self)


def test_fields() -> None:
    """The fields of a dataclass are checked, and left in their own types."""
    assert Box(2.0).size == 2  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Box: size is 0, it must be a whole number above 0"):
        Box(0)


def test_a_wrong_type_is_a_type_error() -> None:
    """Whoever catches TypeError or ValueError, as scripts for the reference do, catches it."""
    for kind in (TypeError, ValueError):
        with pytest.raises(kind):
            annotations.check("owner", "name", "x", float)
