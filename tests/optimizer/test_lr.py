"""Learning-rate schedules against the readings of the reference."""

from collections.abc import Callable

import numpy as np
import pytest

from psfleet.optimizer import lr
from tests.recordings import arrays

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
