"""The formulas, in float64, of rules of which neither the reference nor torch has dense gradients."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet import optimizer
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.optimizer import L2Decay, Optimizer

pytestmark = pytest.mark.quick

SHAPE, STEPS = (5, 3), 12
Doubles = Any  # float64 arrays: NumPy's operators give Any
Hyper = dict[str, Any]
Slots = dict[str, Doubles]


def rowwise_adagrad(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    s["moment"] = s["moment"] + (g**2).mean(axis=1, keepdims=True)
    return w - lr * g / (np.sqrt(s["moment"]) + h["epsilon"])


def proximal_adagrad(w: Doubles, g: Doubles, s: Slots, t: int, lr: float, h: Hyper) -> Doubles:
    s["moment"] = s["moment"] + g**2
    moved = w - lr * g / np.sqrt(np.maximum(s["moment"], 1e-300))  # 0 where no gradient was
    return np.sign(moved) * np.maximum(np.abs(moved) - lr * h["l1"], 0) / (1 + lr * h["l2"])


# (weights, gradient, slots, step from 1, rate, hyperparameters) -> weights; changes the slots.
Formula = Callable[[Doubles, Doubles, Slots, int, float, Hyper], Doubles]
CASES: dict[str, tuple[Hyper, float, Formula, dict[str, float]]] = {
    "RowWiseAdagrad": (
        *({"epsilon": 1e-3, "initial_accumulator_value": 0.3}, 0.05),
        *(rowwise_adagrad, {"moment": 0.3}),
    ),
    "ProximalAdagrad": ({"l1": 0.1, "l2": 0.3}, 0.0, proximal_adagrad, {"moment": 0.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_formula(name: str) -> None:
    """Weights and slots stay at the formula, with L2 regularization and while the rate changes.

    To 1e-5 of the largest value, a hundred times float32's own step: errors of twelve steps add up.
    """
    hyper, decay, formula, first = CASES[name]
    r = np.random.default_rng(4)
    opt: Optimizer = getattr(optimizer, name)(
        learning_rate=0.1, **hyper, **({"regularization": L2Decay(decay)} if decay else {})
    )
    start = r.normal(size=SHAPE).astype(np.float32)
    w, expected = Parameter("w", start), start.astype(np.float64)
    slots = {slot: np.full(SHAPE, value) for slot, value in first.items()}
    for t in range(1, STEPS + 1):
        gradient = r.normal(size=SHAPE).astype(np.float32)
        gradient[0, 0] = 0
        rate = 0.1 / math.sqrt(t)
        opt.set_lr(rate)
        opt.apply_gradients([(w, gradient)])
        expected = formula(expected, gradient + decay * expected, slots, t, rate, hyper)
        close(w.numpy(), expected)
    for key, state in opt.state_dict().items():
        if key.startswith("w.") and key != "w.step":
            close(np.asarray(state), slots[key.removeprefix("w.")])


def close(actual: NDArray[Any], expected: Doubles) -> None:
    largest = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * largest)


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
    assert "not its printed formula" in str(optimizer.ASGD.__doc__)
