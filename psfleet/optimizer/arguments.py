"""Constructors' arguments in all the forms that the reference's documents have."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from psfleet.clip import ClipGradBase
from psfleet.errors import ConfigError
from psfleet.optimizer import graph
from psfleet.regularizer import WeightDecay

__all__ = ["as_documented", "as_number", "check_function"]

P = ParamSpec("P")
S = TypeVar("S")


def as_documented(
    *order: str,
) -> Callable[[Callable[Concatenate[S, P], None]], Callable[Concatenate[S, P], None]]:
    """For an optimizer's constructor: takes what the documents take, and hands on plain arguments.

    Variables and arrays with one value are numbers. Arguments by place may come in the documents'
    order too, where that fits their kinds and the constructor's own order does not.

    Args:
        order: The documents' arguments, from the place where the constructor has `parameters`.
    """

    def decorate(construct: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
        names = list(inspect.signature(construct).parameters)[1:]
        place = names.index("parameters")

        @functools.wraps(construct)
        def constructed(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            given = [as_number(value) for value in args]
            named = {name: as_number(value) for name, value in kwargs.items()}
            rest = given[place:]
            if not _fit(rest, names[place:]) and _fit(rest, order):
                del given[place:]
                for name, value in zip(order, rest, strict=False):
                    if name in named:
                        raise TypeError(f"{type(self).__name__} got two values for {name!r}")
                    named[name] = value
            construct(self, *given, **named)

        return constructed

    return decorate


def as_number(value: Any) -> Any:
    """The number that a variable or an array holds alone; anything else as it is."""
    held = graph.held_by(value)
    single = isinstance(held, np.ndarray | np.generic) and held.size == 1
    return held.item() if single else value


def check_function(owner: str, name: str, value: Any) -> None:
    """Refuse what is neither None nor a function."""
    if value is not None and not callable(value):
        raise ConfigError(f"{owner}: {name} is {value!r}, it must be a function or None")


def _fit(values: Sequence[Any], names: Sequence[str]) -> bool:
    """Whether the values may be the arguments of these names."""
    return len(values) <= len(names) and all(
        name not in _KINDS or _KINDS[name](value)
        for name, value in zip(names, values, strict=False)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_decay(value: Any) -> bool:
    return value is None or isinstance(value, WeightDecay) or _is_number(value)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "exclude_from_weight_decay_fn": lambda value: (
        value is None or (callable(value) and not isinstance(value, ClipGradBase))
    ),
    "grad_clip": lambda value: value is None or isinstance(value, ClipGradBase),
    "initial_accumulator_value": _is_number,
    "lazy_mode": lambda value: isinstance(value, bool),
    "multi_precision": lambda value: isinstance(value, bool),
    "name": lambda value: value is None or isinstance(value, str),
    "parameters": lambda value: (
        value is None or (isinstance(value, Iterable) and not isinstance(value, str))
    ),
    "regularization": _is_decay,
    "use_nesterov": lambda value: isinstance(value, bool),
    "weight_decay": _is_decay,
}
