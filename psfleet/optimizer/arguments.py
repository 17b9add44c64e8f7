"""Optimizers' constructors: arguments checked, in both orders of the documents, for groups too."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from psfleet.errors import WrongType
from psfleet.optimizer.parameter_groups import groups_of
from psfleet.validation.annotations import Form, fits

__all__ = ["as_documented"]

P = ParamSpec("P")
S = TypeVar("S")
_SHARED = frozenset({"learning_rate", "multi_precision", "name", "parameter_list", "parameters"})


def as_documented(
    *order: str,
) -> Callable[[Callable[Concatenate[S, P], None]], Callable[Concatenate[S, P], None]]:
    """For an optimizer's constructor: takes what the documents take, and hands on checked arguments.

    Arguments by place may come in the documents' order too, where that fits their annotations and
    the constructor's own order does not. Groups of parameters become optimizers of their own, which
    lend the one that is made their settings.

    Args:
        order: The documents' arguments, from the place where the constructor has `parameters`.
    """

    def decorate(construct: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
        form = Form(construct)
        place = form.names.index("parameters")

        @functools.wraps(construct)
        def constructed(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            owner, rest = type(self).__name__, args[place:]
            named: dict[str, Any] = dict(kwargs)
            if not _fit(form, rest, form.names[place:]) and _fit(form, rest, order):
                args = args[:place]  # type: ignore[assignment]  # those before `parameters`
                for name, value in zip(order, rest, strict=False):
                    if name in named:
                        raise WrongType(f"{owner} got two values for {name!r}")
                    named[name] = value
            bound = form.bind((self, *args), named)
            given = _by_name(bound.arguments)
            allowed = [name for name in form.annotations if name not in _SHARED]
            groups = groups_of(owner, given, allowed)
            if groups:
                given = {name: v for name, v in given.items() if name != "parameter_list"}
                given["parameters"] = [p for group in groups for p in group.parameters]
            construct(self, **given)  # type: ignore[call-arg]
            for group in groups:
                lender: Any = object.__new__(type(self))
                constructed(lender, **group.arguments(given))  # type: ignore[call-arg]
                group.lend(self, lender)

        return constructed

    return decorate


def _fit(form: Form, values: Sequence[Any], names: Sequence[str]) -> bool:
    """Whether the values may be the arguments of these names."""
    return len(values) <= len(names) and all(
        fits(value, form.annotations[name]) for name, value in zip(names, values, strict=False)
    )


def _by_name(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call but for `self`, those of `**older` among them."""
    rest = {name: value for name, value in arguments.items() if name not in ("self", "older")}
    return rest | dict(arguments.get("older", {}))
