"""Arguments of optimizers' constructors: their two documented orders, their checks, and parameter groups.

Paddle's API exists in two versions, which have the argument `parameters` at different positions of the same
constructor. `as_documented` accepts both orders and checks every argument once. From a list of parameter
groups (dicts with `params`) it makes one optimizer for each group. The optimizer under construction then
uses these optimizers' settings for the groups' parameters.
"""

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
    """Parameters that share settings: one dict in the list passed as `parameters`.

    Attributes:
        parameters: Value of `params` in the dict.
        factor: Factor on the optimizer's learning rate for these parameters.
        settings: Arguments of the optimizer's constructor that differ in this group.
    """

    parameters: Sequence[Any]
    factor: float
    settings: dict[str, Any]

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the constructor's arguments for this group: `values` overridden by the group's settings."""
        own_names = {"parameters", *self.settings}
        # A group that sets weight_decay must not inherit regularization, its other name.
        if _DECAY & own_names:
            own_names |= _DECAY
        whole_settings = {name: value for name, value in values.items() if name not in own_names}
        return whole_settings | self.settings

    def lend(self, whole: Any, lender: Any) -> None:
        """Make the optimizer `whole` use the settings of the optimizer `lender` for the group's
        parameters."""
        lender.factor = self.factor
        whole.lend(lender, self.parameters)


def groups_of(owner: str, values: Mapping[str, Any], names: Sequence[str]) -> list[ParameterGroup]:
    """Return the groups that were passed to a constructor, or an empty list for a plain list of parameters.

    Args:
        owner: Name of the optimizer, for messages.
        names: Names of the arguments that a group may set.

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
    """Return a decorator that lets an optimizer's constructor accept every documented form of its arguments.

    - Positional arguments are read in the constructor's order. If their values do not fit the annotations
      in this order, but do in the older order, they are read in the older order.
    - Each parameter group becomes a separate optimizer. The optimizer under construction uses this
      optimizer's settings for the group's parameters.
    - A program variable is replaced by its number. A variable passed as the learning rate is kept and read
      before each update.

    Args:
        order: Names of the arguments in the older order, from the position of `parameters` in the
            constructor on.
    """

    def decorate(construct: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
        form = Form(construct)
        position = form.names.index("parameters")

        @functools.wraps(construct)
        def constructed(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            owner = type(self).__name__
            by_name: dict[str, Any] = {n: _number(form, owner, n, v) for n, v in kwargs.items()}
            argument_names = itertools.chain(form.names, itertools.repeat(""))
            args = tuple(_number(form, owner, n, v) for n, v in zip(argument_names, args))  # type: ignore[assignment]  # noqa: B905
            trailing_values = args[position:]
            if not _fit(form, trailing_values, form.names[position:]) and _fit(
                form, trailing_values, order
            ):
                args = args[:position]  # type: ignore[assignment]  # those before `parameters`
                for name, value in zip(order, trailing_values, strict=False):
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
    """Return the number of a program variable if the argument takes numbers, else the value unchanged."""
    if name == "learning_rate" or not program_access.is_symbolic(value):
        return value
    is_number = fits(0.5, form.annotations.get(name))
    return program_access.constant_of(owner, name, value) if is_number else value


def _fit(form: Form, values: Sequence[Any], names: Sequence[str]) -> bool:
    """Return whether the values fit the annotations of these arguments, in this order."""
    return len(values) <= len(names) and all(
        fits(value, form.annotations[name]) for name, value in zip(names, values, strict=False)
    )


def _by_name(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, without `self` and including the arguments in `**older`."""
    by_name = {name: value for name, value in arguments.items() if name not in ("self", "older")}
    return by_name | dict(arguments.get("older", {}))
