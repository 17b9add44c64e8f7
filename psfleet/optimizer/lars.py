"""LARS and Lamb: a rate for each parameter, from norms."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

from psfleet import rules
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.clip import ClipGradBase
from psfleet.optimizer.optimizer import LegacyArguments, Optimizer, Rate
from psfleet.parameters.gradients import Grad, scaled
from psfleet.parameters.parameter import Parameter
from psfleet.parameters.regularizer import WeightDecay
from psfleet.rules.rule import Rule
from psfleet.validation.annotations import NonNegative

__all__ = ["Lamb", "LarsMomentum"]


class LarsMomentum(Optimizer):
    """Momentum with the rate learning_rate * lars_coeff * |w| / (|g| + wd * |w| + epsilon).

    Args:
        lars_weight_decay: wd; added to the gradient too.
        exclude_from_weight_decay: Parts of names: wd is 0 for the parameters that have one.
        rescale_grad: A factor on the gradients.
    """

    _rule: rules.LarsMomentum

    @as_documented("regularization", "name")
    def __init__(
        self,
        learning_rate: Rate,
        momentum: float,
        lars_coeff: float = 0.001,
        lars_weight_decay: float = 0.0005,
        parameters: Iterable[Any] | None = None,
        weight_decay: WeightDecay | float | None = None,
        grad_clip: ClipGradBase | None = None,
        name: str | None = None,
        exclude_from_weight_decay: Sequence[str] | None = None,
        epsilon: float = 0.0,
        rescale_grad: float = 1.0,
        **older: Unpack[LegacyArguments],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        self._rule = rules.LarsMomentum(momentum, lars_coeff, lars_weight_decay, epsilon)
        self._excluded = tuple(exclude_from_weight_decay or ())
        self._rescale = rescale_grad

    def rule(self, parameter: Parameter | None = None) -> Rule:
        """The update rule for a parameter."""
        if parameter is None or not any(part in parameter.name for part in self._excluded):
            return self._rule
        return dataclasses.replace(self._rule, lars_weight_decay=0.0)

    def _sent(self, parameter: Parameter, grad: Grad) -> Grad:
        return grad if self._rescale == 1 else scaled(grad, self._rescale)


class Lamb(Optimizer):
    """Adam's direction plus lamb_weight_decay * w, scaled to the norm of w.

    Args:
        exclude_from_weight_decay_fn: Parameter -> whether its weights do not decay; its direction is
            then not scaled either, as in the reference.
    """

    _rule: rules.Lamb

    @as_documented("regularization", "exclude_from_weight_decay_fn", "name")
    def __init__(
        self,
        learning_rate: Rate = 0.001,
        lamb_weight_decay: NonNegative = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameters: Iterable[Any] | None = None,
        grad_clip: ClipGradBase | None = None,
        exclude_from_weight_decay_fn: Callable[[Parameter], bool] | None = None,
        name: str | None = None,
        **older: Unpack[LegacyArguments],
    ) -> None:
        super().__init__(learning_rate, parameters, None, grad_clip, name, **older)
        self._rule = rules.Lamb(beta1, beta2, epsilon, lamb_weight_decay)
        self._excluded = exclude_from_weight_decay_fn

    def rule(self, parameter: Parameter | None = None) -> Rule:
        """The update rule for a parameter."""
        if parameter is None or self._excluded is None or not self._excluded(parameter):
            return self._rule
        return dataclasses.replace(self._rule, weight_decay=0.0)
