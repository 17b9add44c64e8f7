"""Translation of torch optimizers' options and state to the rules of psfleet's servers, and back.

A rule is a server's arithmetic for updating weights. `formula_of` finds the rule that computes exactly what
a torch optimizer would. It raises an error if there is none, since an almost equal rule would train a
slightly different model without a warning. `slots_of` and `entry_of` translate optimizer state from and to
the layout of torch's `state_dict`, so that torch's checkpoints can be loaded and saved. Each rule class
lists its torch counterparts itself (`Rule.torch`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from psfleet.core.base.errors import ConfigError, ShapeError, UsageError
from psfleet.core.engine.rules import RULES
from psfleet.core.engine.rules.adam import NAdam, TorchSparseAdam
from psfleet.core.engine.rules.momentum import Momentum
from psfleet.core.engine.rules.rmsprop import TorchRMSprop
from psfleet.core.engine.rules.rule import Rule, TorchSpec
from psfleet.core.engine.schema.table import DecaySpec

Group = Mapping[str, Any]


Floats = NDArray[np.float32]
_DERIVED = ("step", "mu_product")  # in torch's state, but computed from the table's step count here


@dataclass(frozen=True, slots=True)
class RuleMapping:
    """Rule and options for the updates of a parameter's table.

    Attributes:
        rule: Arithmetic of the optimizer.
        decay: Weight decay, as in psfleet.core.engine.schema.table.TableSpec.
        every_row: True if each step updates all rows, even those without a gradient, as in TableSpec.
    """

    rule: Rule
    decay: DecaySpec = field(default_factory=DecaySpec)
    every_row: bool = False


def formula_of(kind: type[torch.optim.Optimizer], group: Group, *, rows: bool) -> RuleMapping:
    """Find the rule that computes the same as a torch optimizer with these options.

        group = torch.optim.Adam(parameters, betas=(0.9, 0.99)).param_groups[0]
        formula_of(torch.optim.Adam, group, rows=False).rule  # Adam with these betas

    Args:
        rows: True for rows of an embedding, which get sparse gradients. False for dense parameters.

    Raises:
        ConfigError: psfleet has no rule for the optimizer, or none with these options.
    """
    candidates = [(rule, spec) for rule, spec in _declared() if (spec.rows if rows else spec.dense)]
    matching = [
        (rule, spec)
        for rule, spec in candidates
        if getattr(torch.optim, spec.optimizer, None) is kind
    ]
    if not matching:
        trained_kind = "an embedding's rows (sparse gradients)" if rows else "dense parameters"
        raise ConfigError(
            f"torch.optim.{kind.__name__} has no exact rule for {trained_kind}; "
            f"use {', '.join(sorted({spec.optimizer for _, spec in candidates}))}"
        )
    for option in ("maximize", "differentiable"):
        _require(kind, group, option, False)
    if rows:
        _require(kind, group, "weight_decay", 0, "torch refuses it for sparse gradients too")
    matching.sort(key=lambda pair: not pair[1].when)  # a rule for special options goes first
    rule, spec = next(
        (rule, spec)
        for rule, spec in matching
        if all(group.get(option) == value for option, value in spec.when.items())
    )
    for option, value in spec.required.items():
        _require(kind, group, option, value, spec.hint.get(option, ""))
    return _formula(rule, spec, group)


def _declared() -> Iterator[tuple[type[Rule], TorchSpec]]:
    for rule in RULES.values():
        for spec in rule.torch:
            yield rule, spec


def _formula(rule: type[Rule], spec: TorchSpec, group: Group) -> RuleMapping:
    options = spec.options.split()
    names = (item.name for item in fields(rule))
    values = {name: float(_option(group, path)) for name, path in zip(names, options, strict=False)}
    decay = 0.0 if "weight_decay" in options else float(group.get("weight_decay", 0))
    return RuleMapping(rule.from_hyperparameters(values), DecaySpec(l2=decay), spec.every_row)


def _option(group: Group, path: str) -> Any:
    """Return an option of the group by its path: "betas.0" is the first number of the option "betas"."""
    name, _, index = path.partition(".")
    return group[name][int(index)] if index else group[name]


def _require(
    kind: type[torch.optim.Optimizer], group: Group, option: str, expected: Any, hint: str = ""
) -> None:
    value = group.get(option, expected)
    if value != expected:
        raise ConfigError(
            f"torch.optim.{kind.__name__}: {option} is {value!r}, for which psfleet has "
            f"no exact rule; it must be {expected!r}" + (f" ({hint})" if hint else "")
        )


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Optimizer state of one table.

    Attributes:
        step: Number of updates that the table has had, or None if torch's optimizer does not record it.
        values: One float32 array in the parameter's shape for each slot of the rule. A slot is a state
            value that the rule keeps for each weight.
    """

    step: int | None
    values: list[Floats]


def entry_of(rule: Rule, step: int, values: list[Floats]) -> dict[str, Any]:
    """Return a parameter's optimizer state in the layout of torch's optimizer. A rule without state gives {}.

    Args:
        step: Number of updates that the table has had.
        values: One array for each slot (state value of each weight) of the rule.
    """
    entry: dict[str, Any] = {}
    if rule.slots and not isinstance(rule, Momentum):
        count = step if isinstance(rule, TorchSparseAdam) else torch.tensor(float(step))
        entry["step"] = count
    if isinstance(rule, NAdam):
        entry["mu_product"] = torch.tensor(rule.product(step))
    entry |= {
        name: torch.from_numpy(array) for name, array in zip(_names(rule), values, strict=False)
    }
    return entry


def slots_of(
    name: str, rule: Rule, shape: tuple[int, ...], entry: Mapping[str, Any] | None
) -> StateSlots:
    """Convert a parameter's state in a torch optimizer to the state of the parameter's table.

    Args:
        name: Name of the parameter, for error messages.
        entry: State of the parameter in torch's layout, or None if it was never updated.

    Raises:
        UsageError: The state was saved by another optimizer.
        ShapeError: The state has another shape, so it belongs to another parameter.
    """
    names = _names(rule)
    if entry is None:
        return StateSlots(0, [np.full(shape, slot.initial, np.float32) for slot in rule.slots])
    keys = {key for key, value in entry.items() if value is not None}
    foreign = sorted(keys - {*names, *_DERIVED})
    missing = sorted(set(names) - keys - _needless(rule))
    if foreign or missing:
        lack = f"lacks {missing[0]!r}" if missing else f"has {foreign[0]!r}"
        raise UsageError(
            f"the optimizer state of {name!r} {lack}; it was saved by another optimizer, and the "
            f"rule here is {rule}"
        )
    values = [
        np.full(shape, slot.initial, np.float32) if key not in keys else _array(name, entry, key)
        for key, slot in zip(names, rule.slots, strict=True)
    ]
    for key, array in zip(names, values, strict=True):
        if array.shape != shape:
            raise ShapeError(
                f"the optimizer state of {name!r} has {key!r} of shape {array.shape}; it must be "
                f"{shape}"
            )
    return StateSlots(int(entry["step"]) if "step" in keys else None, values)


def _names(rule: Rule) -> list[str]:
    """Return the names that torch gives to the slots of the rule, in the order of the slots."""
    return rule.torch[0].state.split()[: len(rule.slots)] if rule.slots else []


def _needless(rule: Rule) -> set[str]:
    """Return the slots (state values of each weight) that torch leaves out.

    This rule's result does not depend on them.
    """
    return {"momentum_buffer"} if isinstance(rule, TorchRMSprop) and not rule.momentum else set()


def _array(name: str, entry: Mapping[str, Any], key: str) -> Floats:
    value = entry[key]
    if not isinstance(value, Tensor):
        raise UsageError(
            f"the optimizer state of {name!r} has {key} {value!r}; it must be a tensor"
        )
    dense = value.detach().to_dense() if value.is_sparse else value.detach()
    array: Floats = dense.to("cpu", torch.float32).contiguous().numpy()
    return array
