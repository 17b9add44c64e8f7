"""Optimizers' constructors: arguments checked, in both orders of the documents, for groups too."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from psfleet.core.base.errors import ConfigError, WrongType
from psfleet.core.base.validation.annotations import Form, NonNegative, check, fits
from psfleet.optimizer import program_access

_DECAY = frozenset({"regularization", "weight_decay"})  # two names of one argument


P = ParamSpec("P")
S = TypeVar("S")
_SHARED = frozenset({"learning_rate", "multi_precision", "name", "parameter_list", "parameters"})


@dataclass(frozen=True)
class ParameterGroup:
    """One dict of a list of groups.

    Attributes:
        factor: On the optimizer's learning rate.
        settings: Arguments of the optimizer's constructor that differ in this group.
    """

    parameters: Sequence[Any]
    factor: float
    settings: dict[str, Any]

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of an optimizer for this group, from those of the whole one."""
        own_names = {"parameters", *self.settings}
        if _DECAY & own_names:
            own_names |= _DECAY
        others = {name: value for name, value in values.items() if name not in own_names}
        return others | self.settings

    def lend(self, whole: Any, lender: Any) -> None:
        """Let the whole optimizer treat the group's parameters as the lender would."""
        lender.factor = self.factor
        whole.lend(lender, self.parameters)


def groups_of(owner: str, values: Mapping[str, Any], names: Sequence[str]) -> list[ParameterGroup]:
    """The groups that a constructor was given; none: plain parameters.

    Args:
        owner: The optimizer, for messages.
        values: The constructor's arguments by name.
        names: The arguments that a group may have of its own.

    Raises:
        ConfigError: A group is no dict, is empty, or has a setting that is not allowed.
    """
    parameters = values.get("parameters")
    parameters = values.get("parameter_list") if parameters is None else parameters
    if not isinstance(parameters, list | tuple) or not any(
        isinstance(item, Mapping) for item in parameters
    ):
        return []
    return [_group(owner, item, names) for item in parameters]


def _group(owner: str, group: Any, names: Sequence[str]) -> ParameterGroup:
    if not isinstance(group, Mapping):
        raise WrongType(
            f"{owner}: parameters has {group!r} beside groups; each entry must be a dict with 'params'"
        )
    if "params" not in group:
        raise ConfigError(
            f"{owner}: a group of parameters is {dict(group)!r}; it must have 'params'"
        )
    settings = {k: v for k, v in group.items() if k not in ("params", "learning_rate")}
    unknown = [name for name in settings if name not in names]
    if unknown:
        raise ConfigError(
            f"{owner}: a group of parameters has {unknown[0]!r}; it may have params, learning_rate, "
            f"{', '.join(names)}"
        )
    factor = check(owner, "a group's learning_rate", group.get("learning_rate", 1.0), NonNegative)
    parameters = group["params"]
    return ParameterGroup(
        list(parameters) if isinstance(parameters, list | tuple) else [parameters], factor, settings
    )


def as_documented(
    *order: str,
) -> Callable[[Callable[Concatenate[S, P], None]], Callable[Concatenate[S, P], None]]:
    """For an optimizer's constructor: takes what the documents take, and hands on checked arguments.

    Arguments by place may come in the documents' order too, where that fits their annotations and
    the constructor's own order does not. Groups of parameters become optimizers of their own, which
    lend the one that is made their settings. A variable of a program stands for its number, but for the
    learning rate, which is read before each update.

    Args:
        order: The documents' arguments, from the place where the constructor has `parameters`.
    """

    def decorate(construct: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
        form = Form(construct)
        place = form.names.index("parameters")

        @functools.wraps(construct)
        def constructed(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            owner = type(self).__name__
            by_name: dict[str, Any] = {n: _number(form, owner, n, v) for n, v in kwargs.items()}
            places = itertools.chain(form.names, itertools.repeat(""))
            args = tuple(_number(form, owner, n, v) for n, v in zip(places, args))  # type: ignore[assignment]  # noqa: B905
            rest = args[place:]
            if not _fit(form, rest, form.names[place:]) and _fit(form, rest, order):
                args = args[:place]  # type: ignore[assignment]  # those before `parameters`
                for name, value in zip(order, rest, strict=False):
                    if name in by_name:
                        raise WrongType(f"{owner} got two values for {name!r}")
                    by_name[name] = value
            bound = form.bind((self, *args), by_name)
            values = _by_name(bound.arguments)
            group_names = [name for name in form.annotations if name not in _SHARED]
            groups = groups_of(owner, values, group_names)
            if groups:
                values = {name: v for name, v in values.items() if name != "parameter_list"}
                values["parameters"] = [p for group in groups for p in group.parameters]
            construct(self, **values)  # type: ignore[call-arg]
            for group in groups:
                lender: Any = object.__new__(type(self))
                constructed(lender, **group.arguments(values))  # type: ignore[call-arg]
                group.lend(self, lender)

        constructed.__checked__ = True  # type: ignore[attr-defined]
        return constructed

    return decorate


def _number(form: Form, owner: str, name: str, value: Any) -> Any:
    """The number for which a variable of a program stands, if the argument may be one."""
    if name == "learning_rate" or not program_access.is_symbolic(value):
        return value
    is_number = fits(0.5, form.annotations.get(name))
    return program_access.constant_of(owner, name, value) if is_number else value


def _fit(form: Form, values: Sequence[Any], names: Sequence[str]) -> bool:
    """Return whether the values may be the arguments of these names."""
    return len(values) <= len(names) and all(
        fits(value, form.annotations[name]) for name, value in zip(names, values, strict=False)
    )


def _by_name(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call but for `self`, those of `**older` among them."""
    rest = {name: value for name, value in arguments.items() if name not in ("self", "older")}
    return rest | dict(arguments.get("older", {}))
