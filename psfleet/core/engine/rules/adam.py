"""Adam (Kingma and Ba, 2015, algorithm 1), and the rules that change one part of it.

- Adam (Kingma and Ba, 2015, algorithm 1).
- Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
- AMSGrad (Reddi, Kale and Kumar, 2018): Adam whose second moment never shrinks.
- Adamax (Kingma and Ba, 2015, algorithm 2), epsilon inside the maximum as in the reference.
- Adam as torch.optim.SparseAdam computes it: epsilon is not scaled by the bias correction.
- NAdam (Dozat, 2016): Adam with Nesterov's momentum.
- RAdam (Liu et al., 2020): Adam whose rate is rectified while the second moment is young.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import NonNegative, Range
from psfleet.core.engine.rules.finding_rules import rule_class
from psfleet.core.engine.rules.rule import (
    DecayRate,
    OptimizerRules,
    OptimizerSpec,
    Rule,
    Slot,
    TorchSpec,
)

_ADAM = """w -= learning_rate * m^ / (sqrt(v^) + epsilon), with bias-corrected moments.

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


def adam(w, g, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[1] * m + h[2] * g
    v = h[3] * v + h[4] * (g * g)
    return w - h[0] * (m / (math.sqrt(v) + h[5])), m, v


def _adam_rules(
    kind: type["Adam"],
    fields: Mapping[str, float],
    rate: float,
    lazy: bool,
    amsgrad: bool,
    sparse_mode: str | None,
) -> OptimizerRules:
    if sparse_mode not in (None, "lazy", "full", "reference", "catch-up"):
        raise ConfigError(
            f"Adam: sparse_mode is {sparse_mode!r}, use lazy, full, reference or catch-up"
        )
    if sparse_mode == "catch-up" and amsgrad:
        raise ConfigError("Adam: sparse_mode is 'catch-up', which does not know amsgrad")
    dense = (AMSGrad if amsgrad else kind)(**fields)  # type: ignore[arg-type]  # as annotated
    by_rows: Rule = dense
    if sparse_mode in (None, "reference"):
        by_rows = dataclasses.replace(dense, bias_correction_step=1, unscaled_rest=True)
    elif sparse_mode == "catch-up":
        by_rows = rule_class("adam_catch_up")(**fields)  # by name, for its file is made of this one
    lazy = lazy if sparse_mode is None else sparse_mode in ("lazy", "catch-up")
    return OptimizerRules(dense, by_rows, lazy, sparse_mode in ("full", "reference"))


@dataclass(frozen=True)
class Adam(Rule):
    """w -= lr * m^ / (sqrt(v^) + epsilon), with m^ and v^ the bias-corrected moments.

    The two corrections are folded into the rate and into epsilon, as in the paper's section 2:
    m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + e) = s / (1 - b1^t) * m / (sqrt(v) + e * s) with
    s = sqrt(1 - b2^t).

    `bias_correction_step` is added to t in the corrections. The reference's operator for sparse
    gradients behaves as if it were 1.

    `unscaled_rest`: in rows without a gradient, of a table that updates every row, the denominator is
    sqrt(v) + e in place of sqrt(v) + e * s, as in the reference's operator for sparse gradients. It
    reaches the same moments, and another update where e is not small beside sqrt(v).
    """

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-8
    bias_correction_step: Annotated[int, Range(0, 1)] = 0
    unscaled_rest: bool = False
    name = "adam"
    optimizer = OptimizerSpec(
        arguments="beta1 beta2 epsilon parameters weight_decay grad_clip lazy_mode name amsgrad sparse_mode "
        "min_row_size_to_use_multithread",
        older="regularization name lazy_mode",
        options={"amsgrad": (bool, False), "sparse_mode": (str | None, None)},
        ignored={"min_row_size_to_use_multithread": 0},
        rules=_adam_rules,
        doc=_ADAM,
    )
    torch = (TorchSpec("Adam", "betas.0 betas.1 eps", "exp_avg exp_avg_sq"),)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1", smallest="int8"), Slot("moment2", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adam

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        step += self.bias_correction_step
        root = math.sqrt(1 - self.beta2**step)
        rate = learning_rate * root / (1 - self.beta1**step)
        return (rate, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2, self.epsilon * root)

    def resting_scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        scalars = self.scalars(learning_rate, step)
        return (*scalars[:-1], self.epsilon) if self.unscaled_rest else scalars


def adamw(w, g, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[1] * m + h[2] * g
    v = h[3] * v + h[4] * (g * g)
    return h[6] * w - h[0] * (m / (math.sqrt(v) + h[5])), m, v


@dataclass(frozen=True)
class AdamW(Rule):
    """w *= 1 - lr * weight_decay, then Adam's update."""

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-8
    weight_decay: NonNegative = 0.01
    name = "adamw"
    optimizer = OptimizerSpec(
        arguments="beta1 beta2 epsilon parameters weight_decay lr_ratio apply_decay_param_fun grad_clip "
        "lazy_mode name",
        older="",
        decay="weight_decay",
        doc="""w *= 1 - learning_rate * weight_decay, then Adam's update.

        Args:
            weight_decay: Decay of the weights themselves, not of the gradient.
            lr_ratio: Parameter -> a factor on its learning rate.
            apply_decay_param_fun: Parameter name -> whether its weights decay; None: all do.
            lazy_mode: Lazy updates, as in Adam.
        """,
    )
    torch = (
        TorchSpec(
            "AdamW",
            "betas.0 betas.1 eps weight_decay",
            "exp_avg exp_avg_sq",
            required={"amsgrad": False},
        ),
        TorchSpec(
            "Adam",
            "betas.0 betas.1 eps weight_decay",
            "exp_avg exp_avg_sq",
            {"decoupled_weight_decay": True},
            required={"amsgrad": False},
        ),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1", smallest="int8"), Slot("moment2", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adamw

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        adam = Adam(self.beta1, self.beta2, self.epsilon).scalars(learning_rate, step)
        return (*adam, 1 - learning_rate * self.weight_decay)


def amsgrad(w, g, m, v, highest, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[1] * m + h[2] * g
    v = h[3] * v + h[4] * (g * g)
    highest = max(highest, v)
    return w - h[0] * (m / (math.sqrt(highest) + h[5])), m, v, highest


@dataclass(frozen=True)
class AMSGrad(Adam):
    """Adam with the largest v so far in place of v; the bias of both moments is corrected."""

    name = "amsgrad"
    optimizer = OptimizerSpec(
        arguments="beta1 beta2 epsilon parameters weight_decay grad_clip lazy_mode name",
        older="regularization name lazy_mode",
    )
    torch = (
        TorchSpec(
            "Adam",
            "betas.0 betas.1 eps",
            "exp_avg exp_avg_sq max_exp_avg_sq",
            when={"amsgrad": True},
        ),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("moment1", smallest="int8"),
            Slot("moment2", smallest="bfloat16"),
            Slot("moment2_max"),
        )

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return amsgrad


def adamax(w, g, m, norm, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[1] * m + h[2] * g
    norm = max(abs(g), h[3] * norm + h[4])
    return w - h[0] * (m / norm), m, norm


@dataclass(frozen=True)
class Adamax(Rule):
    """u = max(|g|, beta2 * u + epsilon); w -= lr / (1 - beta1^t) * m / u."""

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-8
    name = "adamax"
    optimizer = OptimizerSpec()

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment", smallest="int8"), Slot("inf_norm", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adamax

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        rate = learning_rate / (1 - self.beta1**step)
        return (rate, self.beta1, 1 - self.beta1, self.beta2, self.epsilon)


@dataclass(frozen=True)
class TorchSparseAdam(Rule):
    """w -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon)."""

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-8
    name = "torch_sparse_adam"
    torch = (
        TorchSpec(
            "SparseAdam", "betas.0 betas.1 eps", "exp_avg exp_avg_sq", dense=False, rows=True
        ),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1", smallest="int8"), Slot("moment2", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return adam

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        rate = learning_rate * math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)
        return (rate, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2, self.epsilon)


def nadam(w, g, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[2] * m + h[3] * g
    v = h[4] * v + h[5] * (g * g)
    return w - (h[0] * m + h[1] * g) / (math.sqrt(v) + h[6]), m, v


@dataclass(frozen=True)
class NAdam(Rule):
    """w -= lr * m' / (sqrt(v^) + epsilon), m' looking one step ahead in the schedule mu_t.

    mu_t = beta1 * (1 - 0.96^(t * momentum_decay) / 2);
    m' = mu_(t+1) * m / (1 - mu_1 ... mu_(t+1)) + (1 - mu_t) * g / (1 - mu_1 ... mu_t).
    """

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-8
    momentum_decay: NonNegative = 0.004
    name = "nadam"
    optimizer = OptimizerSpec(learning_rate=0.002)
    torch = (
        TorchSpec(
            "NAdam",
            "betas.0 betas.1 eps momentum_decay",
            "exp_avg exp_avg_sq",
            required={"decoupled_weight_decay": False},
        ),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1", smallest="int8"), Slot("moment2", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return nadam

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        root = math.sqrt(1 - self.beta2**step)
        now, following = self.momentum(step), self.momentum(step + 1)
        product = self.product(step)
        rate = learning_rate * root
        return (
            rate * following / (1 - product * following),
            rate * (1 - now) / (1 - product),
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.epsilon * root,
        )

    def momentum(self, step: int) -> float:
        """mu of a step."""
        return self.beta1 * (1 - 0.5 * math.pow(0.96, step * self.momentum_decay))

    def product(self, step: int) -> float:
        """mu_1 * ... * mu_step; 0 once it is nothing beside 1, which takes few steps."""
        product = 1.0
        for earlier in range(1, step + 1):
            product *= self.momentum(earlier)
            if product < 1e-20:
                return 0.0
        return product


def radam(w, g, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[2] * m + h[3] * g
    v = h[4] * v + h[5] * (g * g)
    return w - (h[0] * (m / (math.sqrt(v) + h[6])) + h[1] * m), m, v


@dataclass(frozen=True)
class RAdam(Rule):
    """w -= lr * r_t * m^ / (sqrt(v) + epsilon) * sqrt(1 - beta2^t) once rho_t > 5, before: lr * m^.

    rho_t = rho - 2 t beta2^t / (1 - beta2^t), rho = 2 / (1 - beta2) - 1;
    r_t^2 = (rho_t - 4)(rho_t - 2) rho / ((rho - 4)(rho - 2) rho_t).
    """

    beta1: DecayRate = 0.9
    beta2: DecayRate = 0.999
    epsilon: NonNegative = 1e-8
    name = "radam"
    optimizer = OptimizerSpec()
    torch = (
        TorchSpec(
            "RAdam",
            "betas.0 betas.1 eps",
            "exp_avg exp_avg_sq",
            required={"decoupled_weight_decay": False},
        ),
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("moment1", smallest="int8"), Slot("moment2", smallest="bfloat16"))

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return radam

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        power = self.beta2**step
        whole = 2 / (1 - self.beta2) - 1
        length = whole - 2 * step * power / (1 - power)
        rate, factor, plain = learning_rate / (1 - self.beta1**step), 0.0, 1.0
        if length > 5:
            factor = math.sqrt(
                (length - 4)
                * (length - 2)
                * whole
                * (1 - power)
                / ((whole - 4) * (whole - 2) * length)
            )
            plain = 0.0
        return (
            rate * factor,
            rate * plain,
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.epsilon,
        )
