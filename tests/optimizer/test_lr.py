"""Learning-rate schedules against the readings of the reference."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psfleet.errors import ConfigError, UsageError
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


def readings(scheduler: lr.LRScheduler, count: int) -> list[float]:
    """The rate before each of `count` steps."""
    rates = []
    for _ in range(count):
        rates.append(scheduler())
        scheduler.step()
    return rates


def test_every_recorded_schedule_is_tried() -> None:
    """The table above names every schedule of the recording."""
    recorded = set(arrays("lr_schedulers")) - {"ReduceOnPlateau", "ReduceOnPlateau_metrics"}
    assert recorded == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_readings(name: str) -> None:
    """39 readings agree with the reference to rounding of float64."""
    golden = arrays("lr_schedulers")[name]
    found = readings(SCHEDULES[name](), len(golden))
    np.testing.assert_allclose(found, golden, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", SCHEDULES)
def test_state_goes_on(name: str) -> None:
    """A new schedule with the state of the old one gives the same rates from there on."""
    first, second = SCHEDULES[name](), SCHEDULES[name]()
    readings(first, 9)
    second.set_state_dict(first.state_dict())
    assert second() == first()
    assert readings(first, 20) == readings(second, 20)


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


OLDER: dict[str, tuple[Callable[[], lr.LRScheduler], Callable[[int], float]]] = {
    "noam": (
        lambda: lr.noam_decay(64, 10),
        lambda n: 64**-0.5 * min((n + 1) ** -0.5, (n + 1) * 10**-1.5),
    ),
    "exponential": (lambda: lr.exponential_decay(B, 5, 0.9), lambda n: B * 0.9 ** (n / 5)),
    "staircase": (
        lambda: lr.exponential_decay(B, 5, 0.9, staircase=True),
        lambda n: B * 0.9 ** (n // 5),
    ),
    "natural": (lambda: lr.natural_exp_decay(B, 5, 0.9), lambda n: B * math.exp(-0.9 * n / 5)),
    "inverse": (lambda: lr.inverse_time_decay(B, 5, 0.9), lambda n: B / (1 + 0.9 * n / 5)),
    "polynomial": (
        lambda: lr.polynomial_decay(B, 5, 0.1),
        lambda n: (B - 0.1) * (1 - min(n, 5) / 5) + 0.1,
    ),
    "piecewise": (
        lambda: lr.piecewise_decay([3, 6], [1.0, 0.5, 0.1]),
        lambda n: 1.0 if n < 3 else 0.5 if n < 6 else 0.1,
    ),
    "cosine": (
        lambda: lr.cosine_decay(B, 3, 10),
        lambda n: B * 0.5 * (math.cos(n // 3 * math.pi / 10) + 1),
    ),
    "warmup": (
        lambda: lr.linear_lr_warmup(lr.exponential_decay(B, 5, 0.9), 4, 0.0, 0.5),
        lambda n: 0.5 * n / 4 if n < 4 else B * 0.9 ** (n / 5),
    ),
}


@pytest.mark.parametrize("name", OLDER)
def test_older_functions(name: str) -> None:
    """The older functions count updates from the first one and are advanced by the optimizer."""
    make, expected = OLDER[name]
    scheduler = make()
    assert scheduler.steps_itself
    golden = [expected(n) for n in range(12)]
    np.testing.assert_allclose(readings(scheduler, 12), golden, rtol=1e-12)


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: lr.NoamDecay(0, 10), "d_model is 0"),
    (lambda: lr.PiecewiseDecay([1], [1.0]), "1 boundaries need 2 values"),
    (lambda: lr.ExponentialDecay(B, 1.5), "gamma is 1.5"),
    (lambda: lr.StepDecay(-1.0, 7), "learning_rate is -1.0"),
    (lambda: lr.StepDecay(B, 0), "step_size is 0"),
    (lambda: lr.MultiStepDecay(B, [5, 3]), r"milestones are \[5, 3\]"),
    (lambda: lr.PolynomialDecay(B, 0), "decay_steps is 0"),
    (lambda: lr.CosineAnnealingDecay(B, 0), "T_max is 0"),
    (lambda: lr.LinearWarmup(B, 3, 0.5, 0.1), "end_lr is 0.1"),
    (lambda: lr.OneCycleLR(B, 40, phase_pct=2.0), "phase_pct is 2.0"),
    (lambda: lr.CyclicLR(0.1, 0.5, 0), "step_size_up is 0"),
    (lambda: lr.ReduceOnPlateau(B, factor=1.0), "factor is 1.0"),
    (lambda: lr.exponential_decay(B, 0, 0.9), "steps is 0"),
]


@pytest.mark.parametrize(("make", "text"), BAD)
def test_bad_arguments(make: Callable[[], Any], text: str) -> None:
    """A bad argument is refused with the value quoted."""
    with pytest.raises(ConfigError, match=text):
        make()


def test_incomplete_state() -> None:
    """A state without an entry is refused by the entry's name and changes nothing."""
    scheduler = lr.StepDecay(B, 7)
    with pytest.raises(UsageError, match="last_lr"):
        scheduler.set_state_dict({"last_epoch": 3})
    assert scheduler.last_epoch == 0
