"""Adam and AdamW."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Unpack

from psfleet import rules
from psfleet.errors import ConfigError
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.clip import ClipGradBase
from psfleet.optimizer.optimizer import LegacyArguments, Optimizer, Rate
from psfleet.parameters.parameter import Parameter
from psfleet.parameters.placement import has_any_id
from psfleet.parameters.regularizer import WeightDecay
from psfleet.rules.rule import Rule
from psfleet.validation.annotations import NonNegativeInt

__all__ = ["Adam", "AdamW"]


class Adam(Optimizer):
    """w -= learning_rate * m^ / (sqrt(v^) + epsilon), with bias-corrected moments.

    Args:
        lazy_mode: Rows of a sparse parameter that have no gradient in a step rest: their moments do
            not decay and they do not drift. Parameters with rows for any id are always lazy.
        amsgrad: As AMSGrad.
        bias_correction_step: 1: the corrections are a step ahead, as in the reference's operator
            for sparse gradients.
        sparse_mode: What a step does to the rows of sparse parameters that have no gradient in it.
            "lazy": nothing. "full": what the dense rule does, to the bit. "reference": what the
            reference's operator does, which is the dense rule with sqrt(v) + epsilon in place of
            sqrt(v) + epsilon * sqrt(1 - beta2^t) in these rows. "catch-up": what they have missed of
            "full" is made up for when they next have a gradient, see psfleet.rules.adam_catch_up for
            the error; until then lookups give them without it.
            None: "lazy" if lazy_mode or if the parameter has rows for any id, else "reference".
            AMSGrad has no "reference"; it takes "full" in its place.
        min_row_size_to_use_multithread: Accepted for the reference's sake: servers have threads for
            every table.
    """

    @as_documented("regularization", "name", "lazy_mode")
    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Iterable[Any] | None = None,
        weight_decay: WeightDecay | float | None = None,
        grad_clip: ClipGradBase | None = None,
        lazy_mode: bool = False,
        name: str | None = None,
        amsgrad: bool = False,
        bias_correction_step: int = 0,
        sparse_mode: str | None = None,
        min_row_size_to_use_multithread: NonNegativeInt = 0,
        **older: Unpack[LegacyArguments],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        adam = rules.Adam(beta1, beta2, epsilon, bias_correction_step)
        self._rule: Rule = rules.AMSGrad(beta1, beta2, epsilon) if amsgrad else adam
        self.lazy = lazy_mode if sparse_mode is None else sparse_mode in ("lazy", "catch-up")
        self.every_row = sparse_mode in ("full", "reference")
        self._sparse_rule: Rule = self._rule  # of rows for any id
        self._bounded_rule: Rule = self._rule  # of a sparse parameter with a known number of rows
        if sparse_mode not in (None, "lazy", "full", "reference", "catch-up"):
            raise ConfigError(
                f"Adam: sparse_mode is {sparse_mode!r}, use lazy, full, reference or catch-up"
            )
        if sparse_mode == "catch-up" and (amsgrad or bias_correction_step):
            raise ConfigError(
                "Adam: sparse_mode is 'catch-up', which knows neither amsgrad nor "
                "bias_correction_step"
            )
        if sparse_mode == "reference" and amsgrad:
            raise ConfigError("Adam: sparse_mode is 'reference', which does not know amsgrad")
        if sparse_mode is None and not (lazy_mode or amsgrad):
            self._bounded_rule = dataclasses.replace(adam, unscaled_rest=True)
        elif sparse_mode == "reference":
            self._sparse_rule = self._bounded_rule = dataclasses.replace(adam, unscaled_rest=True)
        elif sparse_mode == "catch-up":
            self._sparse_rule = self._bounded_rule = rules.AdamCatchUp(beta1, beta2, epsilon)

    def rule(self, parameter: Parameter | None = None) -> Rule:
        """The update rule for a parameter; None: for one with rows for any id."""
        if parameter is None or has_any_id(parameter):
            return self._sparse_rule
        return self._bounded_rule if parameter.sparse else self._rule


class AdamW(Optimizer):
    """w *= 1 - learning_rate * weight_decay, then Adam's update.

    Args:
        weight_decay: Of the weights themselves, not of the gradient.
        lr_ratio: Parameter -> a factor on its learning rate.
        apply_decay_param_fun: Parameter name -> whether its weights decay; None: all do.
        lazy_mode: As in Adam.
    """

    _rule: rules.AdamW

    @as_documented()
    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Iterable[Any] | None = None,
        weight_decay: float = 0.01,
        lr_ratio: Callable[[Parameter], float] | None = None,
        apply_decay_param_fun: Callable[[str], bool] | None = None,
        grad_clip: ClipGradBase | None = None,
        lazy_mode: bool = False,
        name: str | None = None,
        **older: Unpack[LegacyArguments],
    ) -> None:
        super().__init__(learning_rate, parameters, None, grad_clip, name, **older)
        self._rule = rules.AdamW(beta1, beta2, epsilon, weight_decay)
        self._lr_ratio = lr_ratio
        self._decays = apply_decay_param_fun
        self.lazy = lazy_mode

    def rule(self, parameter: Parameter | None = None) -> Rule:
        """The update rule for a parameter: without decay where `apply_decay_param_fun` says so."""
        if parameter is None or self._decays is None or self._decays(parameter.name):
            return self._rule
        return dataclasses.replace(self._rule, weight_decay=0.0)

    def rate_factor(self, parameter: Parameter) -> float:
        """What the rate is multiplied by for this parameter."""
        ratio = self._lr_ratio(parameter) if self._lr_ratio else 1.0
        return super().rate_factor(parameter) * ratio
