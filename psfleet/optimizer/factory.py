"""Makes the optimizer class of an update rule from the rule's declaration, so that nothing is declared twice.

A rule (`psfleet.core.engine.rules`) declares its hyperparameters and, in `Rule.optimizer`, the arguments of
its optimizer. `optimizer_of` builds the optimizer class with its signature and docstring.
`psfleet.optimizer.rule_optimizers` calls it for all rules of psfleet. A script can call it for a rule of
its own.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter as Argument
from typing import Any, Unpack

from typing_extensions import override

from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import NonNegativeInt
from psfleet.core.engine.gradients import Grad, scaled
from psfleet.core.engine.rules.rule import OptimizerRules, OptimizerSpec, Rule
from psfleet.core.engine.schema.table import DecaySpec
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.parameters.table_kind import has_any_id
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.optimizer import LegacyArguments, Optimizer

BY_PARAMETER: Mapping[str, tuple[Any, Any]] = {
    "lr_ratio": (Callable[[Parameter], float] | None, None),
    "apply_decay_param_fun": (Callable[[str], bool] | None, None),
    "exclude_from_weight_decay": (Sequence[str] | None, None),
    "exclude_from_weight_decay_fn": (Callable[[Parameter], bool] | None, None),
    "rescale_grad": (float, 1.0),
}
"""Arguments that let an optimizer treat parameters differently, with their annotations and defaults."""


class RuleOptimizer(Optimizer):
    """Base of the optimizers that `optimizer_of` makes from rules."""

    _spec: OptimizerSpec
    _rules: OptimizerRules
    _by_parameter: Mapping[str, Any]

    @override
    def rule(self, parameter: Parameter | None = None) -> Rule:
        """Return the update rule for a parameter.

        Sparse parameters use the rule for rows. An exception is a sparse parameter with a known number of
        rows and weight decay: weight decay changes every row, so the rule for dense parameters is used.

        Args:
            parameter: Parameter, or None for a table whose rows may have any id.
        """
        rules = self._rules
        if rules.by_rows is not None and (
            parameter is None
            or has_any_id(parameter)
            or (parameter.sparse and self.decay(parameter) == DecaySpec())
        ):
            return rules.by_rows
        if parameter is None or not self._is_without_decay(parameter):
            return rules.rule
        return dataclasses.replace(rules.rule, **{self._spec.decay: 0.0})

    def _is_without_decay(self, parameter: Parameter) -> bool:
        setting = self._by_parameter.get
        decays, excludes = setting("apply_decay_param_fun"), setting("exclude_from_weight_decay_fn")
        return bool(
            (decays is not None and not decays(parameter.name))
            or (excludes is not None and excludes(parameter))
            or any(part in parameter.name for part in setting("exclude_from_weight_decay") or ())
        )

    @override
    def rate_factor(self, parameter: Parameter) -> float:
        ratio = self._by_parameter.get("lr_ratio")
        return super().rate_factor(parameter) * (1.0 if ratio is None else ratio(parameter))

    @override
    def _sent(self, parameter: Parameter, grad: Grad) -> Grad:
        factor = self._by_parameter.get("rescale_grad", 1)
        return grad if factor == 1 else scaled(grad, factor)


def optimizer_of(rule: type[Rule]) -> type[Any]:
    """Make the optimizer class that a rule declares in `Rule.optimizer`. The class has the rule's name.

        MyOptimizer = optimizer_of(MyRule)

    Raises:
        UsageError: The rule declares no optimizer.
    """
    declared = rule.optimizer
    if declared is None:
        raise UsageError(f"the rule {rule.__name__} declares no optimizer; set its `optimizer`")
    spec: OptimizerSpec = declared
    fields = _fields(rule, spec)
    ranges = typing.get_type_hints(rule, include_extras=True)
    signature = _signature(rule, spec)
    defaults = {
        name: p.default for name, p in signature.parameters.items() if p.default is not p.empty
    }

    def __init__(self: RuleOptimizer, /, **values: Any) -> None:
        values = defaults | values
        hyperparameters = {fields[name]: values.pop(name) for name in fields if name in values}
        options = {name: values.pop(name) for name in spec.options}
        lazy = values.pop("lazy_mode", spec.lazy)
        for name in spec.ignored:
            values.pop(name)
        self._by_parameter = {name: values.pop(name) for name in BY_PARAMETER if name in values}
        Optimizer.__init__(self, **values)
        if spec.rules is None:
            self._rules = OptimizerRules(rule(**hyperparameters), None, lazy)
        else:
            self._rules = spec.rules(rule, hyperparameters, self.get_lr(), lazy, **options)
        self._rule, self.lazy = self._rules.rule, self._rules.lazy
        self.every_row = self._rules.every_row

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    __init__.__annotations__ = {
        name: ranges[fields[name]] if name in fields else argument.annotation
        for name, argument in signature.parameters.items()
    }
    __init__.__qualname__ = f"{rule.__name__}.__init__"
    construct = as_documented(*spec.older.split())(__init__)
    body = {
        "__doc__": spec.doc or rule.__doc__,
        "__module__": rule.__module__,
        "__init__": construct,
        "_spec": spec,
    }
    return type(rule.__name__, (RuleOptimizer,), body)


def _fields(rule: type[Rule], spec: OptimizerSpec) -> dict[str, str]:
    """Return the rule's field that each argument of the constructor sets, by the argument's name."""
    renamed = spec.fields.values()
    unrenamed = {
        field.name: field.name for field in dataclasses.fields(rule) if field.name not in renamed
    }
    return unrenamed | dict(spec.fields)


def _signature(rule: type[Rule], spec: OptimizerSpec) -> inspect.Signature:
    """Return the constructor's signature: the rule's hyperparameters and the arguments that every optimizer
    has."""
    shared = inspect.signature(Optimizer.__init__).parameters
    types = typing.get_type_hints(Optimizer.__init__, include_extras=True)
    values = {field.name: field.default for field in dataclasses.fields(rule)}
    fields = _fields(rule, spec)
    usual = *fields, "parameters", "weight_decay", "grad_clip", "name"
    extra_arguments = {**BY_PARAMETER, **spec.options, "lazy_mode": (bool, False)}
    arguments = [
        shared["self"],
        _argument("learning_rate", types["learning_rate"], spec.learning_rate),
    ]
    for name in spec.arguments.split() or dict.fromkeys(usual):
        if name in fields:
            value = values[fields[name]]
            arguments.append(_argument(name, type(value), value))
        elif name in spec.ignored:
            value = spec.ignored[name]
            kind = NonNegativeInt if isinstance(value, int) else float
            arguments.append(_argument(name, kind, value))
        elif name in extra_arguments:
            arguments.append(_argument(name, *extra_arguments[name]))
        else:
            arguments.append(shared[name].replace(annotation=types[name]))
    required = {*spec.required.split()} | (
        {"learning_rate"} if spec.learning_rate is None else set()
    )
    arguments = [
        parameter.replace(default=Argument.empty) if parameter.name in required else parameter
        for parameter in arguments
    ]
    older = Argument("older", Argument.VAR_KEYWORD, annotation=Unpack[LegacyArguments])
    return inspect.Signature([*arguments, older], return_annotation=None)


def _argument(name: str, annotation: Any, default: Any) -> Argument:
    return Argument(name, Argument.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
