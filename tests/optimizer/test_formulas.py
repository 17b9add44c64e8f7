"""Every optimizer against its textbook formula in float64, with hyperparameters drawn at random."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet import optimizer
from psfleet.optimizer import L2Decay, Optimizer
from psfleet.parameters.parameter import Parameter

SHAPE, STEPS, SEEDS = (5, 3), 12, range(6)

Doubles = Any  # float64 arrays: NumPy's operators give Any
Hyper = dict[str, Any]
Slots = dict[str, Doubles]
# (weights, gradient, slots, step from 1, rate, hyperparameters) -> weights; changes the slots.
Formula = Callable[[Doubles, Doubles, Slots, int, float, Hyper], Doubles]
Draw = Callable[[np.random.Generator], Hyper]


@dataclass(frozen=True)
class Case:
    """How the hyperparameters are drawn, the first values of the slots, and the formula."""

    draw: Draw
    formula: Formula
    slots: dict[str, str | float]  # a first value, or the name of the hyperparameter that has it
    decays: bool = True  # whether L2 regularization is tried too


def log(r: np.random.Generator, low: float, high: float) -> float:
    """A number between two, as likely in each decade."""
    return float(np.exp(r.uniform(np.log(low), np.log(high))))


def betas(r: np.random.Generator) -> Hyper:
    beta1 = float(r.uniform(0, 0.97))
    return {"beta1": beta1, "beta2": float(r.uniform(beta1, 0.9999)), "epsilon": log(r, 1e-9, 1e-1)}


def norm(values: Doubles) -> float:
    """The Euclidean norm of all values."""
    return float(np.sqrt((values**2).sum()))


def sgd(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    return w - lr * g


def momentum(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    s["velocity"] = h["momentum"] * s["velocity"] + g
    ahead = g + h["momentum"] * s["velocity"]
    return w - lr * (ahead if h["use_nesterov"] else s["velocity"])


def lars(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    decay = h["lars_weight_decay"]
    local = lr
    if decay > 0 and norm(w) > 0 and norm(g) > 0:
        local *= h["lars_coeff"] * norm(w) / (norm(g) + decay * norm(w) + h["epsilon"])
    s["velocity"] = h["momentum"] * s["velocity"] + local * (g + decay * w)
    return w - s["velocity"]


def adagrad(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    s["moment"] = s["moment"] + g**2
    return w - lr * g / (np.sqrt(s["moment"]) + h["epsilon"])


def rowwise_adagrad(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    s["moment"] = s["moment"] + (g**2).mean(axis=1, keepdims=True)
    return w - lr * g / (np.sqrt(s["moment"]) + h["epsilon"])


def decayed_adagrad(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    s["moment"] = h["decay"] * s["moment"] + (1 - h["decay"]) * g**2
    return w - lr * g / (np.sqrt(s["moment"]) + h["epsilon"])


def adadelta(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    rho, epsilon = h["rho"], h["epsilon"]
    s["avg_squared_grad"] = rho * s["avg_squared_grad"] + (1 - rho) * g**2
    update = g * np.sqrt((s["avg_squared_update"] + epsilon) / (s["avg_squared_grad"] + epsilon))
    s["avg_squared_update"] = rho * s["avg_squared_update"] + (1 - rho) * update**2
    return w - lr * update


def moments(g: Doubles, s: Slots, t: int, h: Hyper) -> tuple[Doubles, Doubles]:
    """Adam's moments, corrected."""
    s["moment1"] = h["beta1"] * s["moment1"] + (1 - h["beta1"]) * g
    s["moment2"] = h["beta2"] * s["moment2"] + (1 - h["beta2"]) * g**2
    return s["moment1"] / (1 - h["beta1"] ** t), s["moment2"] / (1 - h["beta2"] ** t)


def adam(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    first, second = moments(g, s, t, h)
    return w - lr * first / (np.sqrt(second) + h["epsilon"])


def adamw(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    first, second = moments(g, s, t, h)
    return w - lr * (first / (np.sqrt(second) + h["epsilon"]) + h["weight_decay"] * w)


def amsgrad(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    first, _ = moments(g, s, t, h)
    s["moment2_max"] = np.maximum(s["moment2_max"], s["moment2"])
    highest = s["moment2_max"] / (1 - h["beta2"] ** t)
    return w - lr * first / (np.sqrt(highest) + h["epsilon"])


def adamax(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    s["moment"] = h["beta1"] * s["moment"] + (1 - h["beta1"]) * g
    s["inf_norm"] = np.maximum(np.abs(g), h["beta2"] * s["inf_norm"] + h["epsilon"])
    return w - lr / (1 - h["beta1"] ** t) * s["moment"] / s["inf_norm"]


def lamb(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    first, second = moments(g, s, t, h)
    decay = h["lamb_weight_decay"]
    u = first / (np.sqrt(second) + h["epsilon"]) + decay * w
    trust = norm(w) / norm(u) if decay > 0 and norm(w) > 0 and norm(u) > 0 else 1.0
    return w - lr * trust * u


def rmsprop(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    rho = h["rho"]
    s["mean_square"] = rho * s["mean_square"] + (1 - rho) * g**2
    spread = s["mean_square"]
    if h["centered"]:
        s["mean_grad"] = rho * s["mean_grad"] + (1 - rho) * g
        spread = spread - s["mean_grad"] ** 2
    s["momentum"] = h["momentum"] * s["momentum"] + lr * g / np.sqrt(spread + h["epsilon"])
    return w - s["momentum"]


def ftrl(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    power = -h["lr_power"]
    before, s["squared"] = s["squared"], s["squared"] + g**2
    s["linear"] = s["linear"] + g - (s["squared"] ** power - before**power) / lr * w
    bound = np.clip(s["linear"], -h["l1"], h["l1"])
    tiny = 1e-10  # the reference adds it: a weight without gradients would be 0 / 0
    return (bound - s["linear"]) / (s["squared"] ** power / lr + 2 * (h["l2"] + tiny))


def nadam(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    s["moment1"] = h["beta1"] * s["moment1"] + (1 - h["beta1"]) * g
    s["moment2"] = h["beta2"] * s["moment2"] + (1 - h["beta2"]) * g**2
    mu = [h["beta1"] * (1 - 0.5 * 0.96 ** (k * h["momentum_decay"])) for k in range(1, t + 2)]
    first = mu[t] * s["moment1"] / (1 - math.prod(mu))
    first = first + (1 - mu[t - 1]) * g / (1 - math.prod(mu[:t]))
    return w - lr * first / (np.sqrt(s["moment2"] / (1 - h["beta2"] ** t)) + h["epsilon"])


def radam(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    first, _ = moments(g, s, t, h)
    power = h["beta2"] ** t
    whole = 2 / (1 - h["beta2"]) - 1
    length = whole - 2 * t * power / (1 - power)
    if length <= 5:
        return w - lr * first
    rectified = math.sqrt(
        (length - 4) * (length - 2) * whole / ((whole - 4) * (whole - 2) * length)
    )
    return w - lr * rectified * first * math.sqrt(1 - power) / (
        np.sqrt(s["moment2"]) + h["epsilon"]
    )


def rprop(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    (low, high), (shrink, grow) = h["learning_rate_range"], h["etas"]
    agreement = s["prevs"] * g
    rates = s["learning_rates"]
    grown, shrunk = np.minimum(rates * grow, high), np.maximum(rates * shrink, low)
    s["learning_rates"] = np.where(agreement > 0, grown, np.where(agreement < 0, shrunk, rates))
    s["prevs"] = np.where(agreement < 0, 0.0, g)
    return w - np.sign(s["prevs"]) * s["learning_rates"]


def asgd(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    batch = f"y_{(t - 1) % h['batch_num']}"
    s["d"] = s["d"] - s[batch] + g
    s[batch] = g
    return w - lr / min(t, h["batch_num"]) * s["d"]


def proximal_gd(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    moved = w - lr * g
    return np.sign(moved) * np.maximum(np.abs(moved) - lr * h["l1"], 0) / (1 + lr * h["l2"])


MOMENTS: dict[str, str | float] = {"moment1": 0.0, "moment2": 0.0}
CASES = {
    "SGD": Case(lambda r: {}, sgd, {}),
    "Momentum": Case(
        lambda r: {"momentum": r.uniform(0, 0.99), "use_nesterov": bool(r.integers(2))},
        momentum,
        {"velocity": 0.0},
    ),
    "LarsMomentum": Case(
        lambda r: {
            "momentum": r.uniform(0, 0.99),
            "lars_coeff": log(r, 1e-4, 1),
            "lars_weight_decay": float(r.choice([0.0, 1e-4, 0.1])),
            "epsilon": float(r.choice([0.0, 1e-3])),
        },
        lars,
        {"velocity": 0.0},
        decays=False,
    ),
    "Adagrad": Case(
        lambda r: {
            "epsilon": log(r, 1e-8, 1e-1),
            "initial_accumulator_value": float(r.choice([0.0, 0.3])),
        },
        adagrad,
        {"moment": "initial_accumulator_value"},
    ),
    "RowWiseAdagrad": Case(
        lambda r: {
            "epsilon": log(r, 1e-8, 1e-1),
            "initial_accumulator_value": float(r.choice([0.0, 0.3])),
        },
        rowwise_adagrad,
        {"moment": "initial_accumulator_value"},
    ),
    "DecayedAdagrad": Case(
        lambda r: {"decay": r.uniform(0.1, 0.999), "epsilon": log(r, 1e-8, 1e-1)},
        decayed_adagrad,
        {"moment": 0.0},
    ),
    "Adadelta": Case(
        lambda r: {"rho": r.uniform(0.1, 0.999), "epsilon": log(r, 1e-8, 1e-1)},
        adadelta,
        {"avg_squared_grad": 0.0, "avg_squared_update": 0.0},
    ),
    "Adam": Case(betas, adam, MOMENTS),
    "AdamW": Case(
        lambda r: {**betas(r), "weight_decay": float(r.choice([0.0, 0.01, 0.3]))},
        adamw,
        MOMENTS,
        decays=False,
    ),
    "AMSGrad": Case(betas, amsgrad, {**MOMENTS, "moment2_max": 0.0}),
    "Adamax": Case(betas, adamax, {"moment": 0.0, "inf_norm": 0.0}),
    "Lamb": Case(
        lambda r: {**betas(r), "lamb_weight_decay": float(r.choice([0.0, 0.01, 0.3]))},
        lamb,
        MOMENTS,
    ),
    "RMSProp": Case(
        lambda r: {
            "rho": r.uniform(0.1, 0.99),
            "epsilon": log(r, 1e-5, 1e-1),
            "momentum": r.uniform(0, 0.95),
            "centered": bool(r.integers(2)),
        },
        rmsprop,
        {"momentum": 0.0, "mean_square": 0.0, "mean_grad": 0.0},
    ),
    "Ftrl": Case(
        lambda r: {
            "l1": float(r.choice([0.0, 0.2])),
            "l2": float(r.choice([0.0, 0.5])),
            "lr_power": float(r.choice([-0.5, -0.3, -0.8])),
        },
        ftrl,
        {"squared": 0.0, "linear": 0.0},
    ),
    "NAdam": Case(lambda r: {**betas(r), "momentum_decay": log(r, 1e-4, 1)}, nadam, MOMENTS),
    "RAdam": Case(betas, radam, MOMENTS),
    "Rprop": Case(
        lambda r: {
            "learning_rate_range": (1e-4, float(r.uniform(0.3, 1))),
            "etas": (float(r.uniform(0.1, 0.9)), float(r.uniform(1.1, 2))),
        },
        rprop,
        {"prevs": 0.0, "learning_rates": "learning_rate"},
    ),
    "ASGD": Case(
        lambda r: {"batch_num": int(r.integers(1, 5))},
        asgd,
        {"d": 0.0, **{f"y_{i}": 0.0 for i in range(4)}},
    ),
    "ProximalGD": Case(
        lambda r: {"l1": log(r, 1e-3, 1), "l2": log(r, 1e-3, 1)}, proximal_gd, {}, decays=False
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_formula(name: str, seed: int) -> None:
    """Weights and slots stay at the formula, with L2 regularization and while the rate changes.

    To 1e-5 of the largest value, a hundred times float32's own step: errors of twelve steps add up.
    """
    case, r = CASES[name], np.random.default_rng([seed, len(name)])
    hyper, rate = case.draw(r), log(r, 1e-3, 0.3)
    decay = float(r.choice([0.0, 0.05])) if case.decays else 0.0
    opt: Optimizer = getattr(optimizer, name)(
        learning_rate=rate, **hyper, **({"regularization": L2Decay(decay)} if decay else {})
    )
    start = r.normal(size=SHAPE).astype(np.float32)
    w, expected = Parameter("w", start), start.astype(np.float64)
    firsts = {**hyper, "learning_rate": rate}
    slots = {
        slot: np.full(SHAPE, firsts[first] if isinstance(first, str) else first)
        for slot, first in case.slots.items()
    }
    for t in range(1, STEPS + 1):
        gradient = r.normal(size=SHAPE).astype(np.float32)
        gradient[0, 0] = 0
        opt.set_lr(rate / math.sqrt(t))
        opt.apply_gradients([(w, gradient)])
        whole = gradient + decay * expected
        expected = case.formula(expected, whole, slots, t, rate / math.sqrt(t), hyper)
        close(w.numpy(), expected)
    for key, found in opt.state_dict().items():
        if key.startswith("w.") and key != "w.step":
            close(np.asarray(found), slots[key.removeprefix("w.")])


def close(found: NDArray[Any], expected: Doubles) -> None:
    largest = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * largest)


def test_asgd_decays_as_the_references_code() -> None:
    """The decay enters each batch's gradient before the sum, as in the reference's code. The formula that
    the reference prints adds it at the current weights, and ends elsewhere; the docstring says so.
    """
    grads = np.random.default_rng(2).normal(size=(7, 5))
    opt, w = optimizer.ASGD(0.1, 3, weight_decay=0.5), Parameter("w", np.ones(5))
    code, printed = np.ones(5), np.ones(5)
    code_sum, printed_sum = np.zeros(5), np.zeros(5)
    code_kept, printed_kept = np.zeros((3, 5)), np.zeros((3, 5))
    for t, g in enumerate(grads):
        opt.apply_gradients([(w, g)])
        decayed = g + 0.5 * code
        code_sum += decayed - code_kept[t % 3]
        code_kept[t % 3] = decayed
        code = code - 0.1 * code_sum / min(t + 1, 3)
        printed_sum += g - printed_kept[t % 3]
        printed_kept[t % 3] = g
        printed = printed - 0.1 * (printed_sum / min(t + 1, 3) + 0.5 * printed)
    np.testing.assert_allclose(w.numpy(), code, atol=2e-6)
    assert np.abs(w.numpy() - printed).max() > 0.01
    assert "code and not its printed formula" in str(optimizer.ASGD.__doc__)
