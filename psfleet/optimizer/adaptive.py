"""Optimizers whose rate adapts to each parameter: Adam, AdamW, LARS, Lamb and Rprop."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import NonNegative, NonNegativeInt
from psfleet.core.engine import rules
from psfleet.core.engine.gradients import Grad, scaled
from psfleet.core.engine.rules.rule import Rule
from psfleet.core.engine.schema.table import DecaySpec
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.parameters.table_kind import has_any_id
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.clip import ClipGradBase
from psfleet.optimizer.optimizer import LegacyArguments, Optimizer, Rate
from psfleet.regularizer import WeightDecay


class Adam(Optimizer):
    """w -= learning_rate * m^ / (sqrt(v^) + epsilon), with bias-corrected moments.

    Args:
        lazy_mode: Rows of a sparse parameter that have no gradient in a step rest: their moments do
            not decay and they do not drift. Parameters with rows for any id are always lazy.
        amsgrad: Variant, as AMSGrad.
        sparse_mode: Rule that sparse parameters follow.
            None: the reference's operator for sparse gradients, whose bias corrections are a step ahead of
            the dense rule's; rows without a gradient rest if lazy_mode or if the parameter has rows for any
            id, else they are updated with sqrt(v) + epsilon in place of
            sqrt(v) + epsilon * sqrt(1 - beta2^t). "reference": that operator, and every row is updated.
            The others have the dense rule's corrections. "lazy": rows without a gradient rest. "full": what
            the dense rule does, to the bit. "catch-up": what rows have missed of "full" is made up for when
            they next have a gradient, see psfleet.core.engine.rules.adam_catch_up for the error; until then
            lookups give them without it.
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
        sparse_mode: str | None = None,
        min_row_size_to_use_multithread: NonNegativeInt = 0,
        **older: Unpack[LegacyArguments],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        if sparse_mode not in (None, "lazy", "full", "reference", "catch-up"):
            raise ConfigError(
                f"Adam: sparse_mode is {sparse_mode!r}, use lazy, full, reference or catch-up"
            )
        if sparse_mode == "catch-up" and amsgrad:
            raise ConfigError("Adam: sparse_mode is 'catch-up', which does not know amsgrad")
        adam = (rules.AMSGrad if amsgrad else rules.Adam)(beta1, beta2, epsilon)
        self._rule: Rule = adam
        self._sparse_rule: Rule = adam
        self.lazy = lazy_mode if sparse_mode is None else sparse_mode in ("lazy", "catch-up")
        self.every_row = sparse_mode in ("full", "reference")
        if sparse_mode in (None, "reference"):
            self._sparse_rule = dataclasses.replace(
                adam, bias_correction_step=1, unscaled_rest=True
            )
        elif sparse_mode == "catch-up":
            self._sparse_rule = rules.AdamCatchUp(beta1, beta2, epsilon)

    def rule(self, parameter: Parameter | None = None) -> Rule:
        """The update rule for a parameter; None: for one with rows for any id.

        Regularization makes the gradient of a sparse parameter with a known number of rows dense.
        """
        if parameter is None or has_any_id(parameter):
            return self._sparse_rule
        by_rows = parameter.sparse and self.decay(parameter) == DecaySpec()
        return self._sparse_rule if by_rows else self._rule


class AdamW(Optimizer):
    """w *= 1 - learning_rate * weight_decay, then Adam's update.

    Args:
        weight_decay: Decay of the weights themselves, not of the gradient.
        lr_ratio: Parameter -> a factor on its learning rate.
        apply_decay_param_fun: Parameter name -> whether its weights decay; None: all do.
        lazy_mode: Lazy updates, as in Adam.
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
        """Return the factor on the rate for this parameter."""
        ratio = self._lr_ratio(parameter) if self._lr_ratio else 1.0
        return super().rate_factor(parameter) * ratio


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
        weight_decay: Regularization, as of every optimizer: added to the gradient, beside
            lamb_weight_decay.
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
        weight_decay: WeightDecay | float | None = None,
        **older: Unpack[LegacyArguments],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        self._rule = rules.Lamb(beta1, beta2, epsilon, lamb_weight_decay)
        self._excluded = exclude_from_weight_decay_fn

    def rule(self, parameter: Parameter | None = None) -> Rule:
        """The update rule for a parameter."""
        if parameter is None or self._excluded is None or not self._excluded(parameter):
            return self._rule
        return dataclasses.replace(self._rule, weight_decay=0.0)


class Rprop(Optimizer):
    """w -= sign(g) * rate; each weight's rate grows while the sign stays and shrinks when it turns.

    Args:
        learning_rate: The first rate of every weight.
        learning_rate_range: Smallest and largest rate.
        etas: Factors on the rate: after a turn, and otherwise.
    """

    @as_documented("regularization", "name")
    def __init__(
        self,
        learning_rate: Rate = 0.001,
        learning_rate_range: tuple[float, float] = (1e-5, 50.0),
        parameters: Iterable[Any] | None = None,
        etas: tuple[float, float] = (0.5, 1.2),
        weight_decay: WeightDecay | float | None = None,
        grad_clip: ClipGradBase | None = None,
        name: str | None = None,
        **older: Unpack[LegacyArguments],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        self._rule = rules.Rprop(self.get_lr(), *learning_rate_range, *etas)
