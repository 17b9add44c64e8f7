"""Which rule of psfleet is the arithmetic of a torch optimizer, option by option."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from psfleet.errors import ConfigError
from psfleet.rules.adadelta import Adadelta
from psfleet.rules.adagrad import Adagrad
from psfleet.rules.adam import Adam
from psfleet.rules.adamw import AdamW
from psfleet.rules.amsgrad import AMSGrad
from psfleet.rules.momentum import Momentum
from psfleet.rules.nadam import NAdam
from psfleet.rules.radam import RAdam
from psfleet.rules.rule import Rule
from psfleet.rules.sgd import SGD
from psfleet.rules.torch_rmsprop import TorchRMSprop
from psfleet.rules.torch_sparse_adam import TorchSparseAdam
from psfleet.schema.table import Decay

__all__ = ["Formula", "Group", "formula_of"]

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Formula:
    """How the servers update a parameter. Attributes as in psfleet.schema.table.TableSpec."""

    rule: Rule
    decay: Decay = field(default_factory=Decay)
    every_row: bool = False


def formula_of(kind: type[torch.optim.Optimizer], group: Group, *, rows: bool) -> Formula:
    """The formula of one parameter group.

    Args:
        kind: The optimizer's class.
        group: One of its `param_groups`.
        rows: For an embedding's rows with their sparse gradients; else for dense parameters.

    Raises:
        ConfigError: psfleet has no rule that computes the same.
    """
    known = _FOR_ROWS if rows else _FOR_DENSE
    what = "an embedding's rows (sparse gradients)" if rows else "dense parameters"
    if kind not in known:
        raise ConfigError(
            f"torch.optim.{kind.__name__} has no exact rule for {what}; "
            f"use {', '.join(sorted(k.__name__ for k in known))}"
        )
    for option in ("maximize", "differentiable"):
        _require(kind, group, option, False)
    if rows:
        _require(kind, group, "weight_decay", 0, "torch refuses it for sparse gradients too")
    return known[kind](kind, group)


def _require(
    kind: type[torch.optim.Optimizer], group: Group, option: str, wanted: Any, hint: str = ""
) -> None:
    value = group.get(option, wanted)
    if value != wanted:
        raise ConfigError(
            f"torch.optim.{kind.__name__}: {option} is {value!r}, for which psfleet has "
            f"no exact rule; it must be {wanted!r}" + (f" ({hint})" if hint else "")
        )


def _decay(group: Group) -> Decay:
    return Decay(l2=float(group["weight_decay"]))


def _sgd(kind: type[torch.optim.Optimizer], group: Group) -> Formula:
    momentum = float(group["momentum"])
    if not momentum:
        return Formula(SGD(), _decay(group))
    _require(kind, group, "dampening", 0)
    # torch's velocity of a sparse gradient keeps moving the rows that it has ever touched.
    return Formula(Momentum(momentum, bool(group["nesterov"])), _decay(group), every_row=True)


def _adagrad(kind: type[torch.optim.Optimizer], group: Group) -> Formula:
    _require(kind, group, "lr_decay", 0, "use a scheduler of torch.optim.lr_scheduler")
    return Formula(
        Adagrad(float(group["eps"]), float(group["initial_accumulator_value"])), _decay(group)
    )


def _betas(group: Group) -> tuple[float, float, float]:
    first, second = group["betas"]
    return float(first), float(second), float(group["eps"])


def _adam(kind: type[torch.optim.Optimizer], group: Group) -> Formula:
    if group.get("decoupled_weight_decay", kind is torch.optim.AdamW):
        _require(kind, group, "amsgrad", False)
        return Formula(AdamW(*_betas(group), float(group["weight_decay"])))
    rule = AMSGrad if group["amsgrad"] else Adam
    return Formula(rule(*_betas(group)), _decay(group))


def _sparse_adam(kind: type[torch.optim.Optimizer], group: Group) -> Formula:
    return Formula(TorchSparseAdam(*_betas(group)))


def _nadam(kind: type[torch.optim.Optimizer], group: Group) -> Formula:
    _require(kind, group, "decoupled_weight_decay", False)
    return Formula(NAdam(*_betas(group), float(group["momentum_decay"])), _decay(group))


def _radam(kind: type[torch.optim.Optimizer], group: Group) -> Formula:
    _require(kind, group, "decoupled_weight_decay", False)
    return Formula(RAdam(*_betas(group)), _decay(group))


def _rmsprop(kind: type[torch.optim.Optimizer], group: Group) -> Formula:
    rule = TorchRMSprop(
        float(group["alpha"]),
        float(group["eps"]),
        float(group["momentum"]),
        bool(group["centered"]),
    )
    return Formula(rule, _decay(group))


def _adadelta(kind: type[torch.optim.Optimizer], group: Group) -> Formula:
    return Formula(Adadelta(float(group["rho"]), float(group["eps"])), _decay(group))


_Make = Callable[[type[torch.optim.Optimizer], Group], Formula]

_FOR_DENSE: dict[type[torch.optim.Optimizer], _Make] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.NAdam: _nadam,
    torch.optim.RAdam: _radam,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adadelta: _adadelta,
}
_FOR_ROWS: dict[type[torch.optim.Optimizer], _Make] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.SparseAdam: _sparse_adam,
}
