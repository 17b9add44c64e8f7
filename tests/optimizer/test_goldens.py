"""Optimizers against recorded trajectories of the reference: weights and every state slot."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psfleet.clip import ClipGradByGlobalNorm
from psfleet.optimizer import (
    SGD,
    Adagrad,
    Adam,
    Ftrl,
    L1Decay,
    L2Decay,
    Momentum,
    Optimizer,
)
from psfleet.parameter import Parameter, SparseGrad
from tests.optimizer.goldens import arrays, hyper

TOLERANCE = 2e-6
ROUNDING = 3e-7  # two float32 roundings: Ftrl has state values near 40
Make = Callable[[dict[str, Any]], Optimizer]


def momentum(h: dict[str, Any]) -> Optimizer:
    decay = h["regularization_coeff"] if h["regularization_method"] == "l2_decay" else None
    return Momentum(h["lr"], h["mu"], use_nesterov=h["use_nesterov"], weight_decay=decay)


def adagrad(h: dict[str, Any]) -> Optimizer:
    return Adagrad(h["lr"], h["epsilon"], initial_accumulator_value=h["initial_accumulator_value"])


def adam(h: dict[str, Any]) -> Optimizer:
    return Adam(h["lr"], h["beta1"], h["beta2"], h["epsilon"])


def ftrl(h: dict[str, Any]) -> Optimizer:
    return Ftrl(h["lr"], h["l1"], h["l2"], h["lr_power"])


MOMENTS = {"m1": "moment1", "m2": "moment2"}
DENSE: dict[str, tuple[Make, dict[str, str]]] = {
    "sgd": (lambda h: SGD(h["lr"]), {}),
    "sgd_l2decay": (lambda h: SGD(h["lr"], weight_decay=h["l2"]), {}),
    "sgd_l1decay": (lambda h: SGD(h["lr"], weight_decay=L1Decay(h["l1"])), {}),
    "sgd_globalnorm_l2": (lambda h: SGD(h["lr"], weight_decay=L2Decay(h["l2"]),
                                        grad_clip=ClipGradByGlobalNorm(h["clip_norm"])), {}),
    "momentum": (momentum, {"velocity": "velocity"}),
    "momentum_l2_rescale": (momentum, {"velocity": "velocity"}),
    "momentum_nesterov": (momentum, {"velocity": "velocity"}),
    "momentum_nesterov_l2_rescale": (momentum, {"velocity": "velocity"}),
    "adagrad": (adagrad, {"moment": "moment"}),
    "adam": (adam, MOMENTS),
    "adam_l2decay": (lambda h: Adam(h["lr"], weight_decay=h["l2"]), {}),
    "ftrl_lrpower0p5": (ftrl, {"squared": "squared", "linear": "linear"}),
    "ftrl_lrpower0p4": (ftrl, {"squared": "squared", "linear": "linear"}),
}


@pytest.mark.parametrize("shape", ["7", "5x3"])
@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str, shape: str) -> None:
    """Weights and recorded state slots agree with the reference in each of ten steps."""
    z = arrays(f"{name}_{shape}")
    make, slots = DENSE[name]
    opt, w = make(hyper(f"{name}_{shape}")), Parameter("w", z["param0"])
    for t, gradient in enumerate(z["grads"]):
        opt.apply_gradients([(w, gradient)])
        close(w.numpy(), z["params"][t])
        state = opt.state_dict()
        for recorded, slot in slots.items():
            close(state[f"w.{slot}"], z[f"state_{recorded}"][t])


SPARSE: dict[str, tuple[Make, dict[str, str]]] = {
    "sparse_sgd": (lambda h: SGD(h["lr"]), {}),
    "sparse_adagrad": (lambda h: Adagrad(h["lr"], 0.01, initial_accumulator_value=0.1),
                       {"w_moment_0": "moment"}),
    "sparse_momentum": (lambda h: Momentum(h["lr"], 0.9), {"w_velocity_0": "velocity"}),
}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse(name: str, plain: bool) -> None:
    """So do gradients by rows, for a plain parameter and for one that is sparse."""
    z = arrays(name)
    make, slots = SPARSE[name]
    opt = make(hyper(name))
    w = Parameter("w", z["param0"], sparse=not plain)
    for t, (ids, rows) in enumerate(zip(z["ids"], z["row_grads"], strict=True)):
        opt.apply_gradients([(w, SparseGrad(ids, rows))])
        close(w.numpy(), z["params"][t])
        state = opt.state_dict()
        for recorded, slot in slots.items():
            close(state[f"w.{slot}"], z[f"state_{recorded}"][t])


def close(found: Any, recorded: Any) -> None:
    np.testing.assert_allclose(found, recorded, rtol=ROUNDING, atol=TOLERANCE)
