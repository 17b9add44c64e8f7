"""Optimizer classes made from what rules declare."""

import dataclasses
import inspect
import typing
from inspect import Parameter
from typing import Any, Unpack

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.rules.rule import OptimizerSpec, Rule
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.optimizer import LegacyArguments, Optimizer


def optimizer_of(rule: type[Rule]) -> type[Any]:
    """The optimizer class of a rule that declares one (`Rule.optimizer`), with the rule's name.

    Raises:
        UsageError: The rule declares none.
    """
    spec = rule.optimizer
    if spec is None:
        raise UsageError(f"the rule {rule.__name__} declares no optimizer; set its `optimizer`")
    fields = {field.name for field in dataclasses.fields(rule)}
    ranges = typing.get_type_hints(rule, include_extras=True)
    signature = _signature(rule, spec)
    defaults = {
        name: p.default for name, p in signature.parameters.items() if p.default is not p.empty
    }

    def __init__(self: Optimizer, /, **values: Any) -> None:
        values = defaults | values
        own = {name: values.pop(name) for name in fields & values.keys()}
        self.lazy = values.pop("lazy_mode", spec.lazy)
        for name in spec.ignored:
            values.pop(name)
        Optimizer.__init__(self, **values)
        self._rule = rule(**own)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    __init__.__annotations__ = {
        name: ranges[name] if name in fields else argument.annotation
        for name, argument in signature.parameters.items()
    }
    __init__.__qualname__ = f"{rule.__name__}.__init__"
    construct = as_documented(*spec.older.split())(__init__)
    body = {"__doc__": rule.__doc__, "__module__": rule.__module__, "__init__": construct}
    return type(rule.__name__, (Optimizer,), body)


def _signature(rule: type[Rule], spec: OptimizerSpec) -> inspect.Signature:
    """The constructor's arguments: those of every optimizer among the rule's own."""
    shared = inspect.signature(Optimizer.__init__).parameters
    types = typing.get_type_hints(Optimizer.__init__, include_extras=True)
    fields = {field.name: field.default for field in dataclasses.fields(rule)}
    usual = *fields, "parameters", "weight_decay", "grad_clip", "name"
    names = spec.arguments.split() or dict.fromkeys(usual)
    parameters = [
        shared["self"],
        _argument("learning_rate", types["learning_rate"], spec.learning_rate),
    ]
    if spec.learning_rate is None:
        parameters[1] = parameters[1].replace(default=Parameter.empty)
    for name in names:
        if name in fields:
            parameters.append(_argument(name, type(fields[name]), fields[name]))
        elif name in spec.ignored:
            parameters.append(_argument(name, float, spec.ignored[name]))
        elif name == "lazy_mode":
            parameters.append(_argument(name, bool, False))
        else:
            parameters.append(shared[name].replace(annotation=types[name]))
    older = Parameter("older", Parameter.VAR_KEYWORD, annotation=Unpack[LegacyArguments])
    return inspect.Signature([*parameters, older], return_annotation=None)


def _argument(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
