"""Checks arguments against their annotations, with one sentence for every wrong argument.

    @checked
    def warm_up(learning_rate: NonNegative, steps: PositiveInt, shape: Literal["cos", "linear"]): ...

    warm_up(0.1, 2.5, "cos")  # ConfigError: warm_up: steps is 2.5, it must be a whole number above 0

Annotations mean the same as for a type checker, with these additions:
- A `float` must be finite, and a bool is neither a `float` nor an `int`. Arrays and variables with a single
  number are accepted as a number. A float without a fraction is accepted as an `int`.
- A text is neither a `Sequence` nor an `Iterable`.
- If a class has a method `from_argument`, values that the method can convert to an instance are accepted
  too. It raises TypeError for other values.
- `Annotated[..., Range(...)]` bounds a number, and `Annotated[..., Must(...)]` states any other condition.
`Any` accepts everything. Defaults are not checked.
"""

import dataclasses
import difflib
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from psfleet.core.base.errors import ConfigError, WrongType, one_line
from psfleet.core.base.validation.annotation_kinds import ANYTHING, Kind, Must, Range, kind_of

__all__ = [
    "AnyNumber",
    "FilePath",
    "Form",
    "LossValue",
    "Must",
    "NonNegative",
    "NonNegativeInt",
    "Numbers",
    "Positive",
    "PositiveInt",
    "Range",
    "check",
    "check_fields",
    "checked",
    "fits",
]

F = TypeVar("F", bound=Callable[..., Any])


FilePath = Annotated[str | os.PathLike[str], Must(bool, "a path")]
NonNegative = Annotated[float, Range(0)]
NonNegativeInt = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, low_open=True)]
PositiveInt = Annotated[int, Range(0, low_open=True)]
_FIRST = ("self", "cls")
"""Names that the first parameter of a method has. It is not checked, because it is no argument of a call."""


def _is_numeric(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "fiub"
    except (TypeError, ValueError, RuntimeError):
        return False


def is_number(value: Any) -> bool:
    """Return whether a value is one number of Python or NumPy. A bool is none."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


if typing.TYPE_CHECKING:
    AnyNumber = float
else:
    AnyNumber = Annotated[Any, Must(is_number, "a number")]
    """A number, which may be infinite or NaN."""


class _LossValue:
    """Annotation of a number that may be infinite or NaN.

    The setting PSFLEET_ON_NAN decides what happens then.
    """

    @classmethod
    def from_argument(cls, value: Any) -> float:
        """Return the number. Also accepts an array, a tensor or a variable with a single element."""
        content = getattr(value, "value", value)
        if hasattr(content, "item") and np.prod(content.shape) == 1:
            content = content.item()
        if not is_number(content):
            raise TypeError
        return float(content)


if typing.TYPE_CHECKING:
    LossValue = float
else:
    LossValue = Annotated[_LossValue, Must(lambda value: True, "a number")]
Numbers = Annotated[ArrayLike, Must(_is_numeric, "an array of numbers")]


def check(owner: str, name: str, value: Any, annotation: Any) -> Any:
    """Check a value against an annotation. Returns the value, converted to the annotation's type.

    Args:
        owner: Function or object that has the value, for messages.
        name: Name of the value, for messages.
        value: The value.
        annotation: Annotation that the value must satisfy.

    Raises:
        WrongType: The value is of another type.
        ConfigError: The value is out of range.
    """
    kind = kind_of(annotation)
    try:
        return kind.take(value)
    except TypeError:
        error: type[ConfigError] = WrongType
    except ValueError:
        error = ConfigError
    raise error(f"{owner}: {name} is {_shown(value)}, it must be {kind.wanted}")


def fits(value: Any, annotation: Any) -> bool:
    """Return whether the value has the annotation's type. Its range does not matter."""
    try:
        kind_of(annotation).take(value)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def check_fields(owner: str, item: Any) -> None:
    """Check the fields of a dataclass against their annotations, and convert them like `check`."""
    hints = typing.get_type_hints(type(item), include_extras=True)
    for field in dataclasses.fields(item):
        value = check(owner, field.name, getattr(item, field.name), hints[field.name])
        # Works for frozen dataclasses too, whose __post_init__ calls this.
        object.__setattr__(item, field.name, value)


def checked(thing: F) -> F:
    """Decorate a function so that the arguments of every call are checked against its annotations.

    If it decorates a class, its constructor and the public methods that it defines are checked.

    Raises (in each call):
        WrongType: An argument is missing, unknown or of another type.
        ConfigError: An argument is out of range.
    """
    if isinstance(thing, type):
        for name, member in list(vars(thing).items()):
            if not name.startswith("_") or name in ("__init__", "__call__"):
                _check_method(thing, name, member)
        return thing
    form = Form(thing)

    @functools.wraps(thing)
    def call(*args: Any, **kwargs: Any) -> Any:
        if form.is_free:
            return thing(*args, **kwargs)
        arguments = form.taken(args, kwargs)
        if arguments is not None:
            return thing(*arguments[0], **arguments[1])
        # The slow way: something is wrong, or there are *args or **kwargs.
        bound = form.bind(args, kwargs)
        return thing(*bound.args, **bound.kwargs)

    call.__checked__ = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _check_method(owner: type, name: str, member: Any) -> None:
    inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if not isinstance(inner, types.FunctionType) or hasattr(inner, "__checked__"):
        return
    method: Any = checked(inner)
    setattr(owner, name, method if inner is member else type(member)(method))


class Form:
    """Checks the arguments of calls of one function against its annotations.

    Attributes:
        names: Names of the parameters in order, without `self`, `cls` and `**kwargs`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._signature = inspect.signature(function)
        parameters = self._signature.parameters
        self._method = next(iter(parameters), "") in _FIRST
        kinds = {parameter.kind: parameter.name for parameter in parameters.values()}
        self._several = kinds.get(inspect.Parameter.VAR_POSITIONAL, "")
        self._more = kinds.get(inspect.Parameter.VAR_KEYWORD, "")
        self._keywords = kinds.get(inspect.Parameter.KEYWORD_ONLY, "")
        self.names = [name for name in parameters if name not in (*_FIRST, self._more)]

    @functools.cached_property
    def annotations(self) -> dict[str, Any]:
        """Annotations of all parameters by name, including the names that an annotated `**kwargs` allows."""
        hints = self._hints
        annotations = {name: hints.get(name, Any) for name in self.names}
        if typing.get_origin(keyword_hint := hints.get(self._more)) is typing.Unpack:
            (fields,) = typing.get_args(keyword_hint)
            annotations |= typing.get_type_hints(fields, include_extras=True)
        return annotations

    @functools.cached_property
    def _hints(self) -> dict[str, Any]:
        inner: Any = inspect.unwrap(self._function)
        annotations = {
            name: hint for name, hint in inner.__annotations__.items() if name != "return"
        }
        holder = types.SimpleNamespace(__annotations__=annotations)
        return typing.get_type_hints(holder, inner.__globals__, include_extras=True)

    @functools.cached_property
    def is_free(self) -> bool:
        """True if no argument needs a check, because each accepts any value."""
        return all(kind_of(annotation) is ANYTHING for annotation in self.annotations.values())

    @functools.cached_property
    def _kinds(self) -> dict[str, Kind]:
        """Kind of each parameter by name, in order, including `self` or `cls`."""
        first = dict.fromkeys([name for name in self._signature.parameters if name in _FIRST], Any)
        return {name: kind_of(hint) for name, hint in (first | self.annotations).items()}

    @functools.cached_property
    def _needed(self) -> list[str]:
        parameters = self._signature.parameters.values()
        return [p.name for p in parameters if p.default is p.empty]

    def taken(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]] | None:
        """Return the checked arguments of a call, or None if the call needs `bind`.

        A call needs `bind` if an argument is wrong or missing, or if the function has *args, **kwargs or
        keyword-only parameters. For all other calls, this takes a tenth of the time.
        """
        kinds = self._kinds
        if self._several or self._more or self._keywords or len(args) > len(kinds):
            return None
        for name in self._needed[len(args) :]:
            if name not in kwargs:
                return None
        values, keywords = [], {}
        try:
            for name, value in zip(kinds, args, strict=False):
                if name not in kwargs:
                    values.append(kinds[name].take(value))
            for name, value in kwargs.items():
                keywords[name] = kinds[name].take(value)
        except (TypeError, ValueError, KeyError):
            return None
        return (values, keywords) if len(values) == len(args) else None

    @functools.cached_property
    def _others(self) -> Any:
        """Annotation of the arguments in `**kwargs`, or None if `**kwargs` is missing or has named fields."""
        keyword_hint = self._hints.get(self._more)
        return None if typing.get_origin(keyword_hint) is typing.Unpack else keyword_hint

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """Check the arguments of a call, and return them bound to the parameters.

        Raises:
            WrongType: An argument is missing, unknown or of another type.
            ConfigError: An argument is out of range.
        """
        owner = self._function.__name__
        if self._method and args:
            kind = args[0] if isinstance(args[0], type) else type(args[0])
            owner = (
                kind.__name__ if owner in ("__init__", "__call__") else f"{kind.__name__}.{owner}"
            )
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            near = [close for name in kwargs for close in self._near(name)]
            hint = f"; is {near[0]!r} meant?" if near else ""
            raise WrongType(f"{owner}: {error}{hint}") from None
        for values in (bound.arguments, bound.arguments.get(self._more, {})):
            for name, value in values.items():
                if name not in (*_FIRST, self._more, self._several):
                    values[name] = check(owner, name, value, self._annotation(owner, name))
        if self._several in bound.arguments:
            annotation = self.annotations[self._several]
            bound.arguments[self._several] = tuple(
                check(owner, self._several, value, annotation)
                for value in bound.arguments[self._several]
            )
        return bound

    def _near(self, name: str) -> list[str]:
        """Return the parameter with the name most similar to an unknown name, or an empty list."""
        names = [*self.names]
        return [] if name in names else difflib.get_close_matches(name, names, 1)

    def _annotation(self, owner: str, name: str) -> Any:
        if name not in self.annotations and self._others is None:
            raise WrongType(
                f"{owner} has no argument {name!r}; it has {', '.join(self.annotations)}"
            )
        return self.annotations.get(name, self._others)


def _shown(value: Any) -> str:
    text = one_line(repr(value))  # on one line; arrays take several
    return text if len(text) <= 200 else f"{text[:197]}..."
