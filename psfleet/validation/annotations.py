"""Values checked against annotations: one sentence for every argument that is wrong.

    @checked
    def warm_up(learning_rate: NonNegative, steps: PositiveInt, shape: Literal["cos", "linear"]): ...

    warm_up(0.1, 2.5, "cos")  # ConfigError: warm_up: steps is 2.5, it must be a whole number above 0

Annotations mean what they say to a type checker, with these additions:
- a `float` is finite, and neither it nor an `int` is a bool. Arrays and variables that hold one number
  stand for it; an `int` may be a float without a fraction;
- a text is no `Sequence` and no `Iterable`;
- `Annotated[..., Range(...)]` bounds a number, `Annotated[..., Must(...)]` demands anything else.

`Any` takes everything. Defaults are not checked.
"""

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union

import numpy as np

from psfleet.errors import ConfigError, WrongType

__all__ = [
    "Form",
    "Must",
    "NonNegative",
    "NonNegativeInt",
    "Positive",
    "PositiveInt",
    "Range",
    "check",
    "check_fields",
    "checked",
    "fits",
]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Range:
    """Bounds of a number. An end without a bound is open."""

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
    """A condition on a value.

    Attributes:
        hold: Of the value: whether it is right.
        wanted: What a right value is, as in "it must be ...".
    """

    hold: Callable[[Any], bool]
    wanted: str


NonNegative = Annotated[float, Range(0)]
NonNegativeInt = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, low_open=True)]
PositiveInt = Annotated[int, Range(0, low_open=True)]


@dataclass(frozen=True)
class _Kind:
    """What an annotation demands.

    Attributes:
        wanted: In words.
        take: The value in the annotation's own type. Raises TypeError or ValueError, without a text.
    """

    wanted: str
    take: Callable[[Any], Any]


def check(owner: str, name: str, value: Any, annotation: Any) -> Any:
    """The value in the annotation's own type.

    Args:
        owner: Whose value it is, for messages.
        name: Of the value, for messages.

    Raises:
        WrongType: It is of another type. ConfigError: It is out of range.
    """
    kind = _kind(annotation)
    try:
        return kind.take(value)
    except TypeError:
        error: type[ConfigError] = WrongType
    except ValueError:
        error = ConfigError
    raise error(f"{owner}: {name} is {_shown(value)}, it must be {kind.wanted}")


def fits(value: Any, annotation: Any) -> bool:
    """Whether the value is of the annotation's type, in range or not."""
    try:
        _kind(annotation).take(value)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def check_fields(owner: str, item: Any) -> None:
    """Check the fields of a dataclass, and leave each in its own type."""
    hints = typing.get_type_hints(type(item), include_extras=True)
    for field in dataclasses.fields(item):
        taken = check(owner, field.name, getattr(item, field.name), hints[field.name])
        object.__setattr__(item, field.name, taken)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check every call's arguments against the function's annotations.

    Raises (the function then):
        WrongType: An argument is missing, unknown or of another type.
        ConfigError: One is out of range.
    """
    form = Form(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = form.bind(args, kwargs)
        return function(*bound.args, **bound.kwargs)

    return call


class Form:
    """The arguments that a function takes.

    Attributes:
        names: In order; without `self` and without those of an annotated `**kwargs`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._signature = inspect.signature(function)
        found = self._signature.parameters
        self._method = next(iter(found), "") == "self"
        self._more = next((p.name for p in found.values() if p.kind is p.VAR_KEYWORD), "")
        self.names = [name for name in found if name not in ("self", self._more)]

    @functools.cached_property
    def annotations(self) -> dict[str, Any]:
        """Of every argument, those of an annotated `**kwargs` too."""
        hints = typing.get_type_hints(self._function, include_extras=True)
        found = {name: hints.get(name, Any) for name in self.names}
        if self._more:
            (more,) = typing.get_args(hints[self._more])
            found |= typing.get_type_hints(more, include_extras=True)
        return found

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """The arguments of a call, checked."""
        owner = type(args[0]).__name__ if self._method else self._function.__name__
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise WrongType(f"{owner}: {error}") from None
        for values in (bound.arguments, bound.arguments.get(self._more, {})):
            for name, value in values.items():
                if name not in ("self", self._more):
                    values[name] = check(owner, name, value, self._annotation(owner, name))
        return bound

    def _annotation(self, owner: str, name: str) -> Any:
        if name not in self.annotations:
            raise WrongType(
                f"{owner} has no argument {name!r}; it has {', '.join(self.annotations)}"
            )
        return self.annotations[name]


# -- what annotations demand ----------------------------------------------------------------------


@functools.cache
def _kind(annotation: Any) -> _Kind:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is Annotated:
        return functools.reduce(_narrowed, inner[1:], _kind(inner[0]))
    if origin in (Union, types.UnionType):
        return _either([_kind(choice) for choice in inner])
    if origin is Literal:
        return _literal(inner)
    if (origin or annotation) is Callable:
        return _Kind("a function", _only(callable))
    if origin is tuple:
        return _tuple(inner)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _Kind("a dict", _only(lambda value: isinstance(value, Mapping)))
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return _list(inner[0], as_list=issubclass(origin, Sequence))
    if isinstance(annotation, type) and not getattr(annotation, "_is_protocol", False):
        article = "an" if annotation.__name__[0] in "AEIOL" else "a"
        return _Kind(
            f"{article} {annotation.__name__}", _only(lambda value: isinstance(value, annotation))
        )
    return _PLAIN[Any]


def _only(right: Callable[[Any], bool]) -> Callable[[Any], Any]:
    def take(value: Any) -> Any:
        if not right(value):
            raise TypeError
        return value

    return take


def _number(value: Any) -> int | float:
    """A finite number, also of an array or a variable that holds it alone."""
    held = getattr(value, "value", value)
    if isinstance(held, np.ndarray | np.generic) and held.size == 1:
        value = held.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    if isinstance(value, int) and abs(value) >= 2**63:
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


_PLAIN: dict[Any, _Kind] = {
    Any: _Kind("anything", lambda value: value),
    object: _Kind("anything", lambda value: value),
    None: _Kind("None", _only(lambda value: value is None)),
    types.NoneType: _Kind("None", _only(lambda value: value is None)),
    bool: _Kind("True or False", _truth),
    int: _Kind("a whole number", _whole),
    float: _Kind("a finite number", _number),
    str: _Kind("a text", _only(lambda value: isinstance(value, str))),
}


def _narrowed(kind: _Kind, limit: Any) -> _Kind:
    """The kind within a Range, or under a Must."""

    def take(value: Any) -> Any:
        taken = kind.take(value)
        if not (taken in limit if isinstance(limit, Range) else limit.hold(taken)):
            raise TypeError if kind is _PLAIN[Any] else ValueError
        return taken

    if isinstance(limit, Range):
        return _Kind(f"{kind.wanted} {limit}", take)
    return _Kind(limit.wanted, take) if isinstance(limit, Must) else kind


def _either(choices: Sequence[_Kind]) -> _Kind:
    def take(value: Any) -> Any:
        out_of_range = False
        for choice in choices:
            try:
                return choice.take(value)
            except TypeError:
                continue
            except ValueError:
                out_of_range = True
        raise ValueError if out_of_range else TypeError

    words = [choice.wanted for choice in choices]
    return _Kind(f"{', '.join(words[:-1])} or {words[-1]}", take)


def _literal(choices: tuple[Any, ...]) -> _Kind:
    def take(value: Any) -> Any:
        if not isinstance(value, str):
            raise TypeError
        if value not in choices:
            raise ValueError
        return value

    words = [repr(choice) for choice in choices]
    return _Kind(f"{', '.join(words[:-1])} or {words[-1]}", take)


def _list(entry: Any, as_list: bool) -> _Kind:
    """A list; `as_list`: with a length, so its entries are checked too and an array is one."""
    inner = _kind(entry)
    allowed = (Sequence, np.ndarray) if as_list else Iterable

    def take(value: Any) -> Any:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, allowed):
            raise TypeError
        if isinstance(value, np.ndarray) and value.ndim != 1:
            raise TypeError
        return [inner.take(item) for item in value] if as_list else value

    whose = "" if inner is _PLAIN[Any] else f", each {inner.wanted}"
    return _Kind(f"a list{whose}", take)


def _tuple(entries: tuple[Any, ...]) -> _Kind:
    inner = [_kind(entry) for entry in entries]

    def take(value: Any) -> Any:
        if not isinstance(value, list | tuple | np.ndarray) or len(value) != len(inner):
            raise TypeError
        return tuple(kind.take(item) for kind, item in zip(inner, value, strict=True))

    return _Kind(f"{len(inner)} values: {', '.join(kind.wanted for kind in inner)}", take)


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())  # some take several lines
    return text if len(text) <= 200 else f"{text[:197]}..."
