"""DistributedOptimizer: applies the parts of a fleet's strategy that change the optimizer.

Optimizers of psfleet push to the servers even without this wrapper. The wrapper adds the strategy's other
choices: another optimizer instead of the given one (dgc, lars, lamb), recompute, pipelines, merged
gradients, and gradients in 16 bits.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.validation.annotations import Must, checked
from psfleet.core.engine.rules.adam import Adam as AdamRule
from psfleet.core.engine.rules.momentum import Momentum as MomentumRule
from psfleet.core.runtime.strategy import DistributedStrategy, Settings
from psfleet.core.runtime.strategy.distributed_strategy import adopt
from psfleet.optimizer import program_access
from psfleet.optimizer.dgc import DGCMomentum
from psfleet.optimizer.optimizer import Optimizer
from psfleet.optimizer.outgoing_gradients import GradientMerger, GradientScaler
from psfleet.optimizer.rule_optimizers import Adam, Lamb, LarsMomentum, Momentum
from psfleet.optimizer.wrapping_optimizers import (
    PipelineOptimizer,
    RecomputeOptimizer,
    pipelining,
    recomputing,
)


def substitute(optimizer: Optimizer, settings: Settings) -> Optimizer:
    """Return the optimizer that replaces the given one if the strategy has dgc, lars or lamb, else the
    given one.

    If the given one is a PipelineOptimizer or RecomputeOptimizer, the optimizer inside it is replaced.

    Raises:
        ConfigError: dgc, lars or lamb cannot replace an optimizer of this class.
    """
    if type(optimizer) in (PipelineOptimizer, RecomputeOptimizer):
        inner = object.__getattribute__(optimizer, "_inner")
        object.__setattr__(optimizer, "_inner", substitute(inner, settings))
        return optimizer
    names = [name for name in ("dgc", "lars", "lamb") if getattr(settings, name) is not None]
    if names and optimizer.grouped:
        raise ConfigError(
            f"strategy {names[0]} replaces the optimizer {type(optimizer).__name__}, whose parameters "
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
    rule, lamb = optimizer.rule(), settings.lamb
    if type(optimizer) is not Adam or type(rule) is not AdamRule or lamb is None:
        raise ConfigError(
            f"strategy lamb needs the optimizer Adam; it is {type(optimizer).__name__}"
        )
    common: dict[str, Any] = optimizer.common()
    if common.pop("weight_decay") is not None:
        raise ConfigError(
            "strategy lamb has its own weight decay; "
            "set lamb_weight_decay instead of the optimizer's"
        )
    names = lamb.exclude_from_weight_decay
    return Lamb(
        lamb_weight_decay=lamb.lamb_weight_decay,
        beta1=rule.beta1,
        beta2=rule.beta2,
        epsilon=rule.epsilon,
        exclude_from_weight_decay_fn=lambda parameter: any(
            part in parameter.name for part in names
        ),
        **common,
    )


class DistributedOptimizer:
    """Optimizer that follows a fleet's strategy. `fleet.distributed_optimizer` returns one.

        optimizer = fleet.distributed_optimizer(psfleet.optimizer.Adam(0.001), strategy)
        optimizer.minimize(loss)

    Methods and attributes not listed here (`step`, `get_lr`, `state_dict`, ...) are the wrapped
    optimizer's. Parts of the strategy have these effects:

    - dgc, lars and lamb replace the optimizer.
    - gradient_merge pushes the gradients of several steps at once.
    - amp sends gradients, and multiplies the program's matrices, in 16 bits.
    - recompute drops activations after the forward pass and computes them again in the backward pass.
    - pipeline divides the program into stages.

    Args:
        optimizer: Optimizer to wrap.
        strategy: A DistributedStrategy, or settings in the form of a strategy file. None means the strategy
            passed to `fleet.init`. Settings of the launcher override it.

    Attributes:
        optimizer: Optimizer that does the work: the given one or its replacement.
        settings: Strategy in effect.
    """

    @checked
    def __init__(
        self,
        optimizer: Annotated[
            Any,
            Must(
                lambda value: isinstance(value, Optimizer),
                "a psfleet optimizer (psfleet.torch.convert takes those of PyTorch)",
            ),
        ],
        strategy: DistributedStrategy | Settings | Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = strategy if isinstance(strategy, Settings) else adopt(strategy)
        self.optimizer = substitute(optimizer, self.settings)
        if self.settings.recompute is not None:
            self.optimizer = recomputing(self.optimizer, self.settings.recompute)
        if self.settings.pipeline is not None:
            self.optimizer = pipelining(self.optimizer, self.settings.pipeline)
        if self.settings.gradient_merge is not None:
            self.optimizer.merger = GradientMerger(self.settings.gradient_merge)
        if self.settings.amp is not None:
            self.optimizer.scale(GradientScaler(self.settings.amp))

    @checked
    def backward(
        self,
        loss: Any,
        startup_program: Any = None,
        parameter_list: Any = None,
        no_grad_set: Any = None,
        callbacks: Any = None,
    ) -> list[tuple[Any, Any]]:
        """Differentiate the loss: the first part of `minimize`.

        Returns:
            (parameter, gradient) pairs, to be passed to `apply_gradients`.
        """
        pairs: list[tuple[Any, Any]] = self.optimizer.backward(
            loss, startup_program, parameter_list, no_grad_set, callbacks
        )
        return pairs

    @checked
    def apply_gradients(self, params_grads: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Push gradients to the servers, which update the parameters: the second part of `minimize`.

        Args:
            params_grads: (parameter, gradient) pairs, as `backward` returns them.

        Returns:
            Update operations that were added to the program.
        """
        operations: list[Any] = self.optimizer.apply_gradients(params_grads)
        self._set_products(operations)
        return operations

    @checked
    def minimize(
        self,
        losses: Any,
        scopes: Any = None,
        startup_programs: Any = None,
        parameter_list: Any = None,
        no_grad_set: Any = None,
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Differentiate the loss and update the parameters on the servers.

        Args:
            losses: One loss variable, or a list with one.
            scopes: Accepted for Paddle scripts; psfleet has one scope.
            startup_programs: One program or a list with one.
            parameter_list: Parameters to update. None means all trainable ones.
            no_grad_set: Variables that get no gradient.

        Returns:
            (optimize_ops, params_grads).
        """
        result: tuple[list[Any], list[tuple[Any, Any]]] = self.optimizer.minimize(
            _only(losses, "losses"),
            _only(startup_programs, "startup_programs"),
            parameter_list,
            no_grad_set,
        )
        self._set_products(result[0])
        return result

    def _set_products(self, operations: list[Any]) -> None:
        """Make the program multiply its matrices in the precision of the strategy's part amp.

        Args:
            operations: Update operations of the program. An empty list in eager mode.
        """
        if operations and self.settings.amp is not None:
            program_access.set_products(self.settings.amp)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)


def _only(value: Any, name: str) -> Any:
    if not isinstance(value, list | tuple):
        return value
    if len(value) != 1:
        raise UsageError(
            f"{name} has {len(value)} entries; one loss is minimized at a time, add them up"
        )
    return value[0]
