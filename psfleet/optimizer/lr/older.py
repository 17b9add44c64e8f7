"""Schedules under their older names: they count updates and the optimizer advances them."""

import math
from collections.abc import Callable, Sequence

from psfleet.errors import ConfigError
from psfleet.optimizer.lr.base import LRScheduler, check_rate
from psfleet.optimizer.lr.decay import NoamDecay, PiecewiseDecay, PolynomialDecay

__all__ = [
    "PerUpdate",
    "cosine_decay",
    "exponential_decay",
    "inverse_time_decay",
    "linear_lr_warmup",
    "natural_exp_decay",
    "noam_decay",
    "piecewise_decay",
    "polynomial_decay",
]


class PerUpdate(LRScheduler):
    """A rate given by a function of the number of updates before this one."""

    steps_itself = True

    def __init__(self, learning_rate: float, rate: Callable[[int], float]) -> None:
        self.rate = rate
        super().__init__(learning_rate)

    def get_lr(self) -> float:
        return self.rate(self.last_epoch)


def noam_decay(d_model: float, warmup_steps: int, learning_rate: float = 1.0) -> LRScheduler:
    """NoamDecay in updates, with epoch 1 at the first."""
    return _counting(NoamDecay(d_model, warmup_steps, learning_rate, last_epoch=0))


def exponential_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> LRScheduler:
    """learning_rate * decay_rate^(n / decay_steps); `staircase` rounds the exponent down."""
    part = _part("exponential_decay", decay_steps, staircase)
    base = check_rate("exponential_decay", learning_rate)
    return PerUpdate(base, lambda n: base * float(decay_rate ** part(n)))


def natural_exp_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> LRScheduler:
    """learning_rate * e^(-decay_rate * n / decay_steps); `staircase` rounds the quotient down."""
    part = _part("natural_exp_decay", decay_steps, staircase)
    base = check_rate("natural_exp_decay", learning_rate)
    return PerUpdate(base, lambda n: base * math.exp(-decay_rate * part(n)))


def inverse_time_decay(
    learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
) -> LRScheduler:
    """learning_rate / (1 + decay_rate * n / decay_steps); `staircase` as in natural_exp_decay."""
    part = _part("inverse_time_decay", decay_steps, staircase)
    base = check_rate("inverse_time_decay", learning_rate)
    return PerUpdate(base, lambda n: base / (1 + decay_rate * part(n)))


def polynomial_decay(
    learning_rate: float,
    decay_steps: int,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
) -> LRScheduler:
    """From learning_rate to end_learning_rate in decay_steps updates (see PolynomialDecay)."""
    return _counting(PolynomialDecay(learning_rate, decay_steps, end_learning_rate, power, cycle))


def piecewise_decay(boundaries: Sequence[int], values: Sequence[float]) -> LRScheduler:
    """values[i] until update boundaries[i], the last value from then on."""
    return _counting(PiecewiseDecay(boundaries, values))


def cosine_decay(learning_rate: float, step_each_epoch: int, epochs: int) -> LRScheduler:
    """Half a cosine from learning_rate to 0 in `epochs` epochs of step_each_epoch updates."""
    epoch = _part("cosine_decay", step_each_epoch, True)
    base = check_rate("cosine_decay", learning_rate)
    return PerUpdate(base, lambda n: base * 0.5 * (math.cos(epoch(n) * math.pi / epochs) + 1))


def linear_lr_warmup(
    learning_rate: float | LRScheduler, warmup_steps: int, start_lr: float, end_lr: float
) -> LRScheduler:
    """From start_lr to end_lr in warmup_steps updates, then `learning_rate`.

    A schedule that follows counts from the first update, as in the reference.
    """

    def rate(n: int) -> float:
        if n < warmup_steps:
            return start_lr + (end_lr - start_lr) * n / warmup_steps
        if isinstance(learning_rate, LRScheduler):
            learning_rate.step(n + first)
            return learning_rate()
        return learning_rate

    first = learning_rate.last_epoch if isinstance(learning_rate, LRScheduler) else 0
    return PerUpdate(start_lr, rate)


def _counting(scheduler: LRScheduler) -> LRScheduler:
    scheduler.steps_itself = True
    return scheduler


def _part(owner: str, decay_steps: int, whole: bool) -> Callable[[int], float]:
    """n -> n / decay_steps, rounded down if `whole`."""
    if not decay_steps > 0:
        raise ConfigError(f"{owner}: the number of steps is {decay_steps!r}, it must be above 0")
    return lambda n: n // decay_steps if whole else n / decay_steps
