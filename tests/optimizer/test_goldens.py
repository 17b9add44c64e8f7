"""Optimizers and schedules against recordings of the reference: weights, every state slot, and rates."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psfleet.clip import ClipGradBase, ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.optimizer import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    DecayedAdagrad,
    Ftrl,
    L1Decay,
    L2Decay,
    Lamb,
    LarsMomentum,
    LookAhead,
    Momentum,
    NAdam,
    Optimizer,
    ProximalGD,
    RAdam,
    RMSProp,
    Rprop,
    lr,
)
from tests.recordings import arrays, hyper, names, widened

pytestmark = pytest.mark.quick

TOLERANCE = 2e-6
ROUNDING = 5e-7  # a few float32 roundings: Ftrl's `linear` reaches 50, LARS without decay 20
Make = Callable[[dict[str, Any]], Optimizer]


def momentum(h: dict[str, Any]) -> Optimizer:
    decay = h["regularization_coeff"] if h["regularization_method"] == "l2_decay" else None
    return Momentum(h["lr"], h["mu"], use_nesterov=h["use_nesterov"], weight_decay=decay)


def adagrad(h: dict[str, Any]) -> Optimizer:
    return Adagrad(h["lr"], h["epsilon"], initial_accumulator_value=h["initial_accumulator_value"])


def adam(h: dict[str, Any], **more: Any) -> Optimizer:
    return Adam(h["lr"], h["beta1"], h["beta2"], h["epsilon"], **more)


def ftrl(h: dict[str, Any]) -> Optimizer:
    return Ftrl(h["lr"], h["l1"], h["l2"], h["lr_power"])


def rmsprop(h: dict[str, Any]) -> Optimizer:
    return RMSProp(h["lr"], h["decay"], h["epsilon"], h["momentum"], h["centered"])


def lamb(h: dict[str, Any]) -> Optimizer:
    return Lamb(h["lr"], h["weight_decay"], h["beta1"], h["beta2"], h["epsilon"])


def lars(h: dict[str, Any]) -> Optimizer:
    more = {name: h[name] for name in ("epsilon", "rescale_grad")}
    return LarsMomentum(h["lr"], h["mu"], h["lars_coeff"], h["lars_weight_decay"][0], **more)


MOMENTS = {"m1": "moment1", "m2": "moment2"}
NAMED_MOMENTS = {"w_moment1_0": "moment1", "w_moment2_0": "moment2"}
VELOCITY = {"velocity": "velocity"}
MOMENT = {"moment": "moment"}
RMS = {"moment": "momentum", "mean_square": "mean_square"}
FTRL = {"squared": "squared", "linear": "linear"}
DENSE: dict[str, tuple[Make, dict[str, str]]] = {
    "sgd": (lambda h: SGD(h["lr"]), {}),
    "sgd_l2decay": (lambda h: SGD(h["lr"], weight_decay=h["l2"]), {}),
    "sgd_l1decay": (lambda h: SGD(h["lr"], weight_decay=L1Decay(h["l1"])), {}),
    "sgd_globalnorm_l2": (
        lambda h: SGD(
            h["lr"], weight_decay=L2Decay(h["l2"]), grad_clip=ClipGradByGlobalNorm(h["clip_norm"])
        ),
        {},
    ),
    "momentum": (momentum, VELOCITY),
    "momentum_l2_rescale": (momentum, VELOCITY),
    "momentum_nesterov": (momentum, VELOCITY),
    "momentum_nesterov_l2_rescale": (momentum, VELOCITY),
    "momentum_l2_nesterov": (
        lambda h: Momentum(h["lr"], h["mu"], use_nesterov=True, weight_decay=h["l2"]),
        {"w_velocity_0": "velocity"},
    ),
    "adagrad": (adagrad, MOMENT),
    "decayed_adagrad": (lambda h: DecayedAdagrad(h["lr"], h["decay"], h["epsilon"]), MOMENT),
    "adadelta": (
        lambda h: Adadelta(h["lr"], h["epsilon"], h["rho"]),
        {"avg_squared_grad": "avg_squared_grad", "avg_squared_update": "avg_squared_update"},
    ),
    "adam": (adam, MOMENTS),
    "adam_l2decay": (lambda h: Adam(h["lr"], weight_decay=h["l2"]), NAMED_MOMENTS),
    "adamw": (
        lambda h: AdamW(h["lr"], h["beta1"], h["beta2"], h["epsilon"], weight_decay=h["coeff"]),
        MOMENTS,
    ),
    "adamax": (
        lambda h: Adamax(h["lr"], h["beta1"], h["beta2"], h["epsilon"]),
        {"moment": "moment", "inf_norm": "inf_norm"},
    ),
    "nadam": (
        lambda h: NAdam(h["lr"], h["beta1"], h["beta2"], h["eps"], h["momentum_decay"]),
        NAMED_MOMENTS,
    ),
    "radam": (lambda h: RAdam(h["lr"], h["beta1"], h["beta2"], h["eps"]), NAMED_MOMENTS),
    "rprop": (
        lambda h: Rprop(h["lr"], tuple(h["range"]), etas=tuple(h["etas"])),
        {"w_prevs_0": "prevs", "w_learning_rates_0": "learning_rates"},
    ),
    "rmsprop": (rmsprop, RMS),
    "rmsprop_momentum": (rmsprop, RMS),
    "rmsprop_centered": (rmsprop, RMS | {"mean_grad": "mean_grad"}),
    "rmsprop_centered_momentum": (rmsprop, RMS | {"mean_grad": "mean_grad"}),
    "ftrl_lrpower0p5": (ftrl, FTRL),
    "ftrl_lrpower0p4": (ftrl, FTRL),
    "lamb": (lamb, MOMENTS),
    "lamb_wd0": (lamb, MOMENTS),
    "lars_momentum": (lars, VELOCITY),
    "lars_momentum_wd0": (lars, VELOCITY),
    "asgd": (lambda h: ASGD(h["lr"], h["batch_num"]), {"w_d_0": "d"}),
    "lookahead_sgd": (lambda h: LookAhead(SGD(h["lr"]), h["alpha"], h["k"]), {"w_slow_0": "slow"}),
    "proximal_gd": (lambda h: ProximalGD(h["lr"], h["l1"], h["l2"]), {}),
}
AVERAGES = {"ema", "modelaverage"}  # test_averages
ELSEWHERE = {"dgc_momentum", "lr_schedulers"}  # an operator behind compression: test_dgc; below


def test_every_recording_is_tried() -> None:
    """The tables of the tests name every recorded trajectory."""
    recorded = {name.removesuffix("_7").removesuffix("_5x3") for name in names()}
    clips = {name for name in recorded if name.startswith("clip_")}
    assert recorded == set(DENSE) | set(SPARSE) | AVERAGES | ELSEWHERE | clips


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


LARGEST = NAMED_MOMENTS | {"w_moment2_max_0": "moment2_max"}
SPARSE: dict[str, tuple[Make, dict[str, str]]] = {
    "sparse_sgd": (lambda h: SGD(h["lr"]), {}),
    "sparse_adagrad": (
        lambda h: Adagrad(h["lr"], 0.01, initial_accumulator_value=0.1),
        {"w_moment_0": "moment"},
    ),
    "sparse_momentum": (lambda h: Momentum(h["lr"], 0.9), {"w_velocity_0": "velocity"}),
    "sparse_rmsprop": (
        lambda h: RMSProp(h["lr"], 0.9, 0.01, 0.5, centered=True),
        {
            "w_momentum_0": "momentum",
            "w_mean_square_0": "mean_square",
            "w_mean_grad_0": "mean_grad",
        },
    ),
    "sparse_lamb": (lambda h: Lamb(h["lr"], 0.05, 0.8, 0.95, 0.001), NAMED_MOMENTS),
    "sparse_adam_lazy": (lambda h: adam(h, lazy_mode=True), NAMED_MOMENTS),
    "sparse_adam_nonlazy": (adam, NAMED_MOMENTS),
    "sparse_amsgrad_lazy": (lambda h: adam(h, lazy_mode=True, amsgrad=True), LARGEST),
    "sparse_amsgrad_nonlazy": (lambda h: adam(h, amsgrad=True), LARGEST),
}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse(name: str, plain: bool) -> None:
    """So do gradients by rows, for a plain parameter and for one that is sparse."""
    z = arrays(name)
    make, slots = SPARSE[name]
    opt = make(hyper(name))
    w = Parameter("w", widened(z["param0"]), sparse=not plain)
    for t, (ids, rows) in enumerate(zip(z["ids"], widened(z["row_grads"]), strict=True)):
        opt.apply_gradients([(w, SparseGrad(ids, rows))])
        close(w.numpy()[:, :3], z["params"][t])
        state = opt.state_dict()
        for recorded, slot in slots.items():
            close(state[f"w.{slot}"][:, :3], z[f"state_{recorded}"][t])


def close(actual: Any, recorded: Any, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(actual, recorded, rtol=ROUNDING, atol=tolerance)


@pytest.mark.parametrize("shape", ["7", "5x3"])
def test_asgd_batches(shape: str) -> None:
    """ASGD keeps the last gradient of each batch, one state slot for each."""
    z, h = arrays(f"asgd_{shape}"), hyper(f"asgd_{shape}")
    opt, w = ASGD(h["lr"], h["batch_num"]), Parameter("w", z["param0"])
    for t, gradient in enumerate(z["grads"]):
        opt.apply_gradients([(w, gradient)])
        state = opt.state_dict()
        close([state[f"w.y_{i}"] for i in range(h["batch_num"])], z["state_w_y_0"][t])


CLIPS: dict[str, Callable[[dict[str, Any]], ClipGradBase]] = {
    "clip_global_norm": lambda h: ClipGradByGlobalNorm(h["clip_norm"]),
    "clip_global_norm_noop": lambda h: ClipGradByGlobalNorm(h["clip_norm"]),
    "clip_global_norm_needclip": lambda h: ClipGradByGlobalNorm(h["clip_norm"]),
    "clip_by_norm": lambda h: ClipGradByNorm(h["clip_norm"]),
    "clip_by_value": lambda h: ClipGradByValue(h["max"], h["min"]),
}


@pytest.mark.parametrize("name", CLIPS)
def test_clips(name: str) -> None:
    """Clipped gradients agree with the reference; need_clip=False leaves one out."""
    z = arrays(name)
    skipped = left_out(z) if name == "clip_global_norm_needclip" else -1
    pairs = [
        (Parameter(f"p{i}", np.zeros_like(z[f"g{i}"]), need_clip=i != skipped), z[f"g{i}"])
        for i in range(3)
    ]
    for i, (_, clipped) in enumerate(CLIPS[name](hyper(name))(pairs)):
        close(clipped, z[f"out{i}"])


def left_out(z: dict[str, Any]) -> int:
    """The gradient that the recording has unscaled."""
    return next(i for i in range(3) if np.array_equal(z[f"g{i}"], z[f"out{i}"]))


def test_clip_by_rows() -> None:
    """Rows of a repeated id are summed before the norm, and the clipped rows are the dense result's."""
    w = Parameter("w", np.zeros((4, 5)))
    sparse = SparseGrad(
        np.array([3, 1, 3]), widened(np.array([[1, 2, 0], [3, 4, 0], [5, 6, 0]], "f4"))
    )
    dense = widened(np.array([[0, 0, 0], [3, 4, 0], [0, 0, 0], [6, 8, 0]], "f4"))
    for clip in (ClipGradByGlobalNorm(1.0), ClipGradByNorm(2.0), ClipGradByValue(3.5, -1.0)):
        ((_, actual),) = clip([(w, sparse)])
        ((_, expected),) = clip([(w, dense)])
        assert isinstance(actual, SparseGrad)
        rows = np.zeros((4, 5), np.float32)
        rows[actual.ids] = actual.rows
        np.testing.assert_array_equal(rows, expected)


B = 0.5
SCHEDULES: dict[str, Callable[[], lr.LRScheduler]] = {
    "NoamDecay": lambda: lr.NoamDecay(64, 10, learning_rate=B),
    "PiecewiseDecay": lambda: lr.PiecewiseDecay([5, 12, 20], [0.5, 0.2, 0.1, 0.01]),
    "NaturalExpDecay": lambda: lr.NaturalExpDecay(B, 0.1),
    "InverseTimeDecay": lambda: lr.InverseTimeDecay(B, 0.1),
    "PolynomialDecay": lambda: lr.PolynomialDecay(B, 15, end_lr=0.01, power=2.0),
    "PolynomialDecay_cycle": lambda: lr.PolynomialDecay(B, 15, end_lr=0.01, power=2.0, cycle=True),
    "LinearWarmup_const": lambda: lr.LinearWarmup(B, 8, 0.01, 0.5),
    "LinearWarmup_exp": lambda: lr.LinearWarmup(lr.ExponentialDecay(B, 0.9), 8, 0.01, B),
    "ExponentialDecay": lambda: lr.ExponentialDecay(B, 0.9),
    "MultiStepDecay": lambda: lr.MultiStepDecay(B, [5, 12, 20], 0.3),
    "StepDecay": lambda: lr.StepDecay(B, 7, 0.3),
    "LambdaDecay": lambda: lr.LambdaDecay(B, lambda e: 0.95**e),
    "MultiplicativeDecay": lambda: lr.MultiplicativeDecay(B, lambda e: 0.95),
    "CosineAnnealingDecay": lambda: lr.CosineAnnealingDecay(B, 12, eta_min=0.01),
    "OneCycleLR": lambda: lr.OneCycleLR(
        B, 40, divide_factor=25.0, end_learning_rate=1e-4, phase_pct=0.3
    ),
    "OneCycleLR_3phase_linear": lambda: lr.OneCycleLR(
        B, 40, end_learning_rate=1e-4, phase_pct=0.3, anneal_strategy="linear", three_phase=True
    ),
    "CyclicLR_triangular": lambda: lr.CyclicLR(0.1, 0.5, 6, 6),
    "CyclicLR_triangular2": lambda: lr.CyclicLR(0.1, 0.5, 6, 6, mode="triangular2"),
    "CyclicLR_exp_range": lambda: lr.CyclicLR(0.1, 0.5, 6, mode="exp_range", exp_gamma=0.98),
    "LinearLR": lambda: lr.LinearLR(B, 10, 0.25, 0.9),
    "CosineAnnealingWarmRestarts": lambda: lr.CosineAnnealingWarmRestarts(B, 6, 2, 0.01),
}


def test_every_recorded_schedule_is_tried() -> None:
    """The table above names every schedule of the recording."""
    recorded = set(arrays("lr_schedulers")) - {"ReduceOnPlateau", "ReduceOnPlateau_metrics"}
    assert recorded == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_readings(name: str) -> None:
    """39 readings agree with the reference to rounding of float64, though each is that of a new schedule with
    the state of the one before."""
    golden, schedule, rates = arrays("lr_schedulers")[name], SCHEDULES[name](), []
    for _ in golden:
        rates.append(schedule())
        schedule.step()
        before, schedule = schedule, SCHEDULES[name]()
        schedule.set_state_dict(before.state_dict())
    np.testing.assert_allclose(rates, golden, rtol=1e-12, atol=1e-15)


def plateau() -> lr.ReduceOnPlateau:
    return lr.ReduceOnPlateau(B, factor=0.5, patience=2, cooldown=1, threshold=1e-2)


def test_plateau() -> None:
    """ReduceOnPlateau follows the recorded metrics as the reference does, and through its state."""
    z = arrays("lr_schedulers")
    scheduler, rates = plateau(), []
    for metric in z["ReduceOnPlateau_metrics"]:
        rates.append(scheduler())
        scheduler.step(metric)
        fresh = plateau()
        fresh.set_state_dict(scheduler.state_dict())
        scheduler = fresh
    np.testing.assert_allclose(rates, z["ReduceOnPlateau"], rtol=1e-12)


def test_a_warm_up_names_what_follows() -> None:
    """`LinearWarmup.learning_rate` is what it was given, as in the reference."""
    after = lr.ExponentialDecay(B, 0.9)
    assert lr.LinearWarmup(after, 8, 0.01, B).learning_rate is after
    assert lr.LinearWarmup(B, 8, 0.01, 0.5).learning_rate == B
