"""The optimizer that a strategy puts in place of the script's: DGC, LARS and Lamb as switches."""

from typing import Any

from psfleet.errors import ConfigError
from psfleet.optimizer.adam import Adam
from psfleet.optimizer.dgc import DGCMomentum
from psfleet.optimizer.lars import Lamb, LarsMomentum
from psfleet.optimizer.optimizer import Optimizer
from psfleet.optimizer.pipeline_optimizer import PipelineOptimizer
from psfleet.optimizer.recompute_optimizer import RecomputeOptimizer
from psfleet.optimizer.rule_optimizers import Momentum
from psfleet.rules.adam import Adam as AdamRule
from psfleet.rules.momentum import Momentum as MomentumRule
from psfleet.strategy import Settings

__all__ = ["substitute"]


def substitute(optimizer: Optimizer, settings: Settings) -> Optimizer:
    """The optimizer itself, or the one that the strategy makes of it.

    One that is wrapped for a pipeline or for recompute is replaced within its wrappers.

    Raises:
        ConfigError: The switch does not fit the optimizer.
    """
    if type(optimizer) in (PipelineOptimizer, RecomputeOptimizer):
        inner = object.__getattribute__(optimizer, "_inner")
        object.__setattr__(optimizer, "_inner", substitute(inner, settings))
        return optimizer
    said = [name for name in ("dgc", "lars", "lamb") if getattr(settings, name) is not None]
    if said and optimizer.grouped:
        raise ConfigError(
            f"strategy {said[0]} replaces the optimizer {type(optimizer).__name__}, whose parameters "
            "are in groups with settings of their own; give it one list of parameters"
        )
    if settings.dgc is not None:
        rule = _momentum(optimizer, "dgc")
        dgc = settings.dgc
        return DGCMomentum(
            momentum=rule.momentum,
            use_nesterov=rule.use_nesterov,
            rampup_begin_step=dgc.rampup_begin_step,
            rampup_step=dgc.rampup_step,
            sparsity=dgc.sparsity,
            **optimizer.common(),
        )
    if settings.lars is not None:
        rule, lars = _momentum(optimizer, "lars"), settings.lars
        return LarsMomentum(
            momentum=rule.momentum,
            lars_coeff=lars.lars_coeff,
            lars_weight_decay=lars.lars_weight_decay,
            epsilon=lars.epsilon,
            exclude_from_weight_decay=lars.exclude_from_weight_decay,
            **optimizer.common(),
        )
    if settings.lamb is not None:
        return _lamb(optimizer, settings)
    return optimizer


def _momentum(optimizer: Optimizer, switch: str) -> MomentumRule:
    rule = optimizer.rule()
    if type(optimizer) is not Momentum or not isinstance(rule, MomentumRule):
        raise ConfigError(
            f"strategy {switch} needs the optimizer Momentum; it is {type(optimizer).__name__}"
        )
    return rule


def _lamb(optimizer: Optimizer, settings: Settings) -> Optimizer:
    rule, said = optimizer.rule(), settings.lamb
    if type(optimizer) is not Adam or not isinstance(rule, AdamRule) or said is None:
        raise ConfigError(
            f"strategy lamb needs the optimizer Adam; it is {type(optimizer).__name__}"
        )
    common: dict[str, Any] = optimizer.common()
    if common.pop("weight_decay") is not None:
        raise ConfigError(
            "strategy lamb has its own weight decay; "
            "set lamb_weight_decay instead of the optimizer's"
        )
    excluded = said.exclude_from_weight_decay
    return Lamb(
        lamb_weight_decay=said.lamb_weight_decay,
        beta1=rule.beta1,
        beta2=rule.beta2,
        epsilon=rule.epsilon,
        exclude_from_weight_decay_fn=lambda parameter: any(
            part in parameter.name for part in excluded
        ),
        **common,
    )
