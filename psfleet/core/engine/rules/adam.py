"""Adam (Kingma and Ba, 2015), and the rules that change one part of it.

- Adam (Kingma and Ba, 2015, algorithm 1).
- AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
- AMSGrad (Reddi, Kale and Kumar, 2018): Adam whose second moment never shrinks.
- Adamax (Kingma and Ba, 2015, algorithm 2), epsilon inside the maximum as in the reference, Paddle.
- TorchSparseAdam: torch.optim.SparseAdam, where epsilon is not scaled by the bias correction.
- NAdam (Dozat, 2016): Adam with Nesterov's momentum.
- RAdam (Liu et al., 2020): Adam whose learning rate is lower while the second moment is a mean of few steps.

All have a running mean m of the gradients and v of their squares. Both start at 0, which biases them in the
first steps. m^ and v^ are the means without this bias: m^ = m / (1 - beta1^t), v^ = v / (1 - beta2^t), where
t is the step.

In a step without a gradient for a row, the dense rule still lets the row's moments decay and moves its
weights. The argument `sparse_mode` decides whether sparse parameters do the same; adam_catch_up.py is one
way.
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

_ADAM = """Adam: w -= learning_rate * m^ / (sqrt(v^) + epsilon), with bias-corrected moments.

    Args:
        lazy_mode: True to leave rows of a sparse parameter unchanged in a step without a gradient for them:
            their moments do not decay, and their weights do not move. Parameters that accept any id are
            lazy unless sparse_mode updates every row.
        amsgrad: True for the variant AMSGrad.
        sparse_mode: Rule for sparse parameters. None is the operator for sparse gradients of the reference
            (Paddle). It is lazy if lazy_mode is True or if the parameter accepts any id. Its bias
            corrections are a step ahead of those of the dense rule, and in rows without a gradient it divides
            by sqrt(v) + epsilon instead of sqrt(v) + epsilon * sqrt(1 - beta2^t).

            - "reference" is the same operator, but always updates every row.
            - "lazy" is the dense rule, and leaves rows without a gradient unchanged.
            - "full" is the dense rule for every row, bit-identical to a dense parameter.
            - "catch-up" updates a row only in steps with a gradient for it, and first makes up for the steps
              of "full" that the row has missed (psfleet.core.engine.rules.adam_catch_up bounds the error).
              Until then, lookups return the row without these steps.
        min_row_size_to_use_multithread: No effect. Accepted for scripts written for Paddle.
    """


# h: rate * s / (1 - beta1^t), beta1, 1 - beta1, beta2, 1 - beta2, epsilon * s, with s = sqrt(1 - beta2^t).
# `Adam` explains why the bias corrections are in the learning rate and in epsilon.
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
        by_rows = rule_class("adam_catch_up")(**fields)  # by name: its module imports this one
    lazy = lazy if sparse_mode is None else sparse_mode in ("lazy", "catch-up")
    return OptimizerRules(dense, by_rows, lazy, sparse_mode in ("full", "reference"))


@dataclass(frozen=True)
class Adam(Rule):
    """Adam: w -= lr * m^ / (sqrt(v^) + epsilon), with the bias-corrected moments m^ and v^.

    m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g^2.

    Both corrections are folded into the learning rate and into epsilon, as in section 2 of the paper. With
    s = sqrt(1 - beta2^t):

        m^ / (sqrt(v^) + epsilon) = s / (1 - beta1^t) * m / (sqrt(v) + epsilon * s)

    Attributes:
        bias_correction_step: Number that is added to t in the corrections. The operator for sparse gradients
            of the reference (Paddle) computes as if it were 1.
        unscaled_rest: True to divide by sqrt(v) + epsilon instead of sqrt(v) + epsilon * s in rows without a
            gradient, in a table that updates every row. The reference's operator for sparse gradients does
            so. The moments are the same; the update differs unless epsilon is small compared with sqrt(v).
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


# h: as for `adam`, then 1 - lr * weight_decay.
def adamw(w, g, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[1] * m + h[2] * g
    v = h[3] * v + h[4] * (g * g)
    return h[6] * w - h[0] * (m / (math.sqrt(v) + h[5])), m, v


@dataclass(frozen=True)
class AdamW(Rule):
    """Adam with decoupled weight decay: w *= 1 - lr * weight_decay, then Adam's update."""

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
        doc="""Adam with decoupled weight decay: w *= 1 - learning_rate * weight_decay, then Adam's update.

        Args:
            weight_decay: Decay of the weights themselves, which is not added to the gradient.
            lr_ratio: Function from a parameter to a factor on its learning rate.
            apply_decay_param_fun: Function from the name of a parameter to True if its weights decay, or None
                if all weights decay.
            lazy_mode: True for lazy updates of rows, as in Adam.
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


# h: as for `adam`.
def amsgrad(w, g, m, v, highest, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[1] * m + h[2] * g
    v = h[3] * v + h[4] * (g * g)
    highest = max(highest, v)
    return w - h[0] * (m / (math.sqrt(highest) + h[5])), m, v, highest


@dataclass(frozen=True)
class AMSGrad(Adam):
    """Adam with the largest v so far instead of v; the bias of both moments is corrected."""

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


# h: rate / (1 - beta1^t), beta1, 1 - beta1, beta2, epsilon.
def adamax(w, g, m, norm, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[1] * m + h[2] * g
    norm = max(abs(g), h[3] * norm + h[4])
    return w - h[0] * (m / norm), m, norm


@dataclass(frozen=True)
class Adamax(Rule):
    """Adam with a decaying maximum u of |g| instead of the root of v.

    u = max(|g|, beta2 * u + epsilon); w -= lr / (1 - beta1^t) * m / u.
    """

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
    """Adam as torch.optim.SparseAdam computes it, with epsilon unscaled by the bias correction.

    w -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon).
    """

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


# h, with s = sqrt(1 - beta2^t):
#
#   0    rate * s * mu_(t+1) / (1 - mu_1 ... mu_(t+1))
#   1    rate * s * (1 - mu_t) / (1 - mu_1 ... mu_t)
#   2-6  beta1, 1 - beta1, beta2, 1 - beta2, epsilon * s
def nadam(w, g, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[2] * m + h[3] * g
    v = h[4] * v + h[5] * (g * g)
    return w - (h[0] * m + h[1] * g) / (math.sqrt(v) + h[6]), m, v


@dataclass(frozen=True)
class NAdam(Rule):
    """Adam with Nesterov's momentum, where a schedule mu_t gives the momentum of each step.

    w -= lr * m' / (sqrt(v^) + epsilon);
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
        """Return mu, the momentum of a step."""
        return self.beta1 * (1 - 0.5 * math.pow(0.96, step * self.momentum_decay))

    def product(self, step: int) -> float:
        """Return the product mu_1 * ... * mu_step, or 0 if it is below 1e-20.

        After some steps the product is that small, and 1 - product is then 1 in float64.
        """
        product = 1.0
        for earlier in range(1, step + 1):
            product *= self.momentum(earlier)
            if product < 1e-20:
                return 0.0
        return product


# h: factor on m / (sqrt(v) + epsilon), factor on m, beta1, 1 - beta1, beta2, 1 - beta2, epsilon. One of the
# two factors is 0: the first while v is a mean of few steps, and then the second.
def radam(w, g, m, v, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    m = h[2] * m + h[3] * g
    v = h[4] * v + h[5] * (g * g)
    return w - (h[0] * (m / (math.sqrt(v) + h[6])) + h[1] * m), m, v


@dataclass(frozen=True)
class RAdam(Rule):
    """Adam with a rectified learning rate: while v is a mean of few steps, the update is momentum without v.

    w -= lr * m^ while rho_t <= 5, and then w -= lr * r_t * m^ / (sqrt(v) + epsilon) * sqrt(1 - beta2^t);
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
