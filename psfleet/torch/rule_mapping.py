"""Which rule of psfleet is the arithmetic of a torch optimizer, option by option."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from psfleet.errors import ConfigError
from psfleet.rules import RULES
from psfleet.rules.optimizer_spec import TorchSpec
from psfleet.rules.rule import Rule
from psfleet.schema.table import DecaySpec

__all__ = ["Group", "RuleMapping", "formula_of"]

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RuleMapping:
    """How the servers update a parameter. Attributes as in psfleet.schema.table.TableSpec."""

    rule: Rule
    decay: DecaySpec = field(default_factory=DecaySpec)
    every_row: bool = False


def formula_of(kind: type[torch.optim.Optimizer], group: Group, *, rows: bool) -> RuleMapping:
    """The formula of one parameter group.

    Args:
        kind: The optimizer's class.
        group: One of its `param_groups`.
        rows: For an embedding's rows with their sparse gradients; else for dense parameters.

    Raises:
        ConfigError: psfleet has no rule that computes the same.
    """
    known = [(rule, spec) for rule, spec in _declared() if (spec.rows if rows else spec.dense)]
    own = [
        (rule, spec) for rule, spec in known if getattr(torch.optim, spec.optimizer, None) is kind
    ]
    if not own:
        what = "an embedding's rows (sparse gradients)" if rows else "dense parameters"
        raise ConfigError(
            f"torch.optim.{kind.__name__} has no exact rule for {what}; "
            f"use {', '.join(sorted({spec.optimizer for _, spec in known}))}"
        )
    for option in ("maximize", "differentiable"):
        _require(kind, group, option, False)
    if rows:
        _require(kind, group, "weight_decay", 0, "torch refuses it for sparse gradients too")
    own.sort(key=lambda pair: not pair[1].when)  # a rule for special options goes first
    rule, spec = next(pair for pair in own if _chosen(pair[1], group))
    for option, wanted in spec.required.items():
        _require(kind, group, option, wanted, spec.hint.get(option, ""))
    return _formula(rule, spec, group)


def _declared() -> Iterator[tuple[type[Rule], TorchSpec]]:
    for rule in RULES.values():
        for spec in rule.torch:
            yield rule, spec


def _chosen(spec: TorchSpec, group: Group) -> bool:
    return all(group.get(option) == wanted for option, wanted in spec.when.items())


def _formula(rule: type[Rule], spec: TorchSpec, group: Group) -> RuleMapping:
    options = spec.options.split()
    names = (item.name for item in fields(rule))
    values = {name: float(_option(group, path)) for name, path in zip(names, options, strict=False)}
    decay = 0.0 if "weight_decay" in options else float(group.get("weight_decay", 0))
    return RuleMapping(rule.from_hyperparameters(values), DecaySpec(l2=decay), spec.every_row)


def _option(group: Group, path: str) -> Any:
    """An option, or `betas.0`: one of the numbers that an option holds."""
    name, _, place = path.partition(".")
    return group[name][int(place)] if place else group[name]


def _require(
    kind: type[torch.optim.Optimizer], group: Group, option: str, wanted: Any, hint: str = ""
) -> None:
    value = group.get(option, wanted)
    if value != wanted:
        raise ConfigError(
            f"torch.optim.{kind.__name__}: {option} is {value!r}, for which psfleet has "
            f"no exact rule; it must be {wanted!r}" + (f" ({hint})" if hint else "")
        )
