"""Turns an annotation into a Kind: the values that it allows, and the words for them in messages.

A Kind checks a value and converts it to the annotation's own type, for example a NumPy scalar to int.
`kind_of` makes one Kind per annotation and caches it. annotations.py, which uses this module, explains the
rules.
"""

import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, MappingView, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union

import numpy as np


@dataclass(frozen=True)
class Range:
    """Bounds of a number. A bound is infinite by default, and `low_open` or `high_open` excludes it.

    Annotated[float, Range(0, 1, high_open=True)]  # 0 <= x < 1
    """

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'above' if self.low_open else 'of at least'} {self.low:g}"
        if self.low == -math.inf:
            return f"{'below' if self.high_open else 'of at most'} {self.high:g}"
        ends = "(" if self.low_open else "[", ")" if self.high_open else "]"
        return f"in {ends[0]}{self.low:g}, {self.high:g}{ends[1]}"


@dataclass(frozen=True)
class Must:
    """Condition on a value, in an annotation.

        Annotated[int, Must(lambda n: n % 2 == 0, "an even number")]

    Attributes:
        hold: Returns True if the value is allowed.
        wanted: Condition in words, which completes "it must be ...".
    """

    hold: Callable[[Any], bool]
    wanted: str


@dataclass(frozen=True)
class Kind:
    """Check of the values that an annotation allows.

    Attributes:
        wanted: Allowed values in words, which complete "it must be ...".
        take: Returns the value, converted to the annotation's type. Raises TypeError for a value of another
            type and ValueError for a value out of range, both without a text.
    """

    wanted: str
    take: Callable[[Any], Any]


@functools.cache
def kind_of(annotation: Any) -> Kind:
    """Return the Kind for an annotation, such as `float | None` or `Annotated[int, Range(0)]`."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if isinstance(annotation, TypeVar) and annotation.__bound__ is not None:
        return kind_of(annotation.__bound__)
    if origin is Annotated:
        return functools.reduce(_narrowed, inner[1:], kind_of(inner[0]))
    if origin in (Union, types.UnionType):
        return _either([kind_of(choice) for choice in inner])
    if origin is Literal:
        return _literal(inner)
    if (origin or annotation) is Callable:
        return Kind("a function", _only(callable))
    if origin is tuple:
        return _tuple(inner) if Ellipsis not in inner else _row(inner[0])
    if origin is np.ndarray:
        return ANYTHING  # a function with array arguments converts and checks them itself
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return Kind("a dict", _only(lambda value: isinstance(value, Mapping)))
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return _list(inner[0], as_list=issubclass(origin, Sequence))
    cls = origin or annotation
    if isinstance(cls, type) and not getattr(cls, "_is_protocol", False):
        article = "an" if cls.__name__[0] in "AEIOL" else "a"
        home = cls.__module__.partition(".")[0]
        of = "" if home in ("psfleet", "builtins", "os", "numpy") else f" of {home}"
        return Kind(f"{article} {cls.__name__}{of}", _instance(cls))
    return ANYTHING


def _only(right: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Return a function that returns its argument if `right` accepts it, and else raises TypeError."""

    def take(value: Any) -> Any:
        if not right(value):
            raise TypeError
        return value

    return take


def _instance(kind: Any) -> Callable[[Any], Any]:
    """Return a function that accepts instances of a class, and values that `from_argument` can convert."""
    if not hasattr(kind, "from_argument"):
        return _only(lambda value: isinstance(value, kind))
    return lambda value: value if isinstance(value, kind) else kind.from_argument(value)


def _number(value: Any) -> int | float:
    """Return a finite number. Also accepts an array or a variable with a single element."""
    content = getattr(value, "value", value)
    if isinstance(content, np.ndarray | np.generic) and content.size == 1:
        value = content.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    if isinstance(value, int) and abs(value) >= 2**63:  # does not fit into an int64
        raise ValueError
    return value


def _whole(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError
    return int(number)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError
    return bool(value)


ANYTHING = Kind("anything", lambda value: value)
_NONE = Kind("None", _only(lambda value: value is None))
_PLAIN: dict[Any, Kind] = {
    Any: ANYTHING,
    object: ANYTHING,
    None: _NONE,
    types.NoneType: _NONE,
    bool: Kind("True or False", _truth),
    int: Kind("a whole number", _whole),
    float: Kind("a finite number", _number),
    str: Kind("a text", _only(lambda value: isinstance(value, str))),
}


def _narrowed(kind: Kind, limit: Any) -> Kind:
    """Return the kind with a further condition, a Range or a Must. Other metadata of Annotated is ignored."""

    def take(value: Any) -> Any:
        converted = kind.take(value)
        if not (converted in limit if isinstance(limit, Range) else limit.hold(converted)):
            raise TypeError if kind is ANYTHING else ValueError
        return converted

    if isinstance(limit, Range):
        return Kind(f"{kind.wanted} {limit}", take)
    return Kind(limit.wanted, take) if isinstance(limit, Must) else kind


def _either(choices: Sequence[Kind]) -> Kind:
    has_none = _NONE in choices

    def take(value: Any) -> Any:
        if value is None and has_none:
            return None
        # If the value has the right type for one choice but is out of range, report that: ValueError takes
        # precedence over TypeError.
        out_of_range = False
        for choice in choices:
            try:
                return choice.take(value)
            except TypeError:
                continue
            except ValueError:
                out_of_range = True
        raise ValueError if out_of_range else TypeError

    if ANYTHING in choices:
        return ANYTHING
    words = [choice.wanted for choice in choices]
    return Kind(f"{', '.join(words[:-1])} or {words[-1]}", take)


def _literal(choices: tuple[Any, ...]) -> Kind:
    def take(value: Any) -> Any:
        if not isinstance(value, str):
            raise TypeError
        if value not in choices:
            raise ValueError
        return value

    words = [repr(choice) for choice in choices]
    return Kind(f"{', '.join(words[:-1])} or {words[-1]}", take)


def _list(entry: Any, as_list: bool) -> Kind:
    """Return the kind of a list.

    `as_list`: True for a Sequence: arrays are accepted, and the entries are checked. The entries of another
    iterable are not checked, because that would consume it.
    """
    inner = kind_of(entry)
    takes_all = inner is ANYTHING
    classes: Any = (Sequence, np.ndarray, MappingView) if as_list else Iterable

    def take(value: Any) -> Any:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, classes):
            raise TypeError
        if isinstance(value, np.ndarray) and value.ndim != 1:
            raise TypeError
        if takes_all and not isinstance(value, MappingView):
            return value
        return [inner.take(item) for item in value] if as_list else value

    entry_requirement = "" if takes_all else f", each {inner.wanted}"
    return Kind(f"a list{'' if as_list else ' or another iterable'}{entry_requirement}", take)


def _row(entry: Any) -> Kind:
    kind = _list(entry, as_list=True)
    return Kind(kind.wanted, lambda value: tuple(kind.take(value)))


def _tuple(entries: tuple[Any, ...]) -> Kind:
    inner = [kind_of(entry) for entry in entries]

    def take(value: Any) -> Any:
        if not isinstance(value, list | tuple | np.ndarray) or len(value) != len(inner):
            raise TypeError
        return tuple(kind.take(item) for kind, item in zip(inner, value, strict=True))

    return Kind(f"{len(inner)} values: {', '.join(kind.wanted for kind in inner)}", take)
