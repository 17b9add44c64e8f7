"""Learning-rate schedules that count epochs: decay, steps, warm-up, cosine annealing and cycles.

Each class computes the rate of epoch `last_epoch` in `get_lr`. An *epoch* is the time between two calls of
`step()`. Names, arguments and results are those of Paddle. The functions at the top are shared with the
schedules that count updates (`update_counted.py`).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typing_extensions import override

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import (
    Must,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Range,
    checked,
)
from psfleet.optimizer.lr.scheduler import Epoch, LRScheduler, schedule

BelowOne = Annotated[float, Range(0, 1, high_open=True)]
if TYPE_CHECKING:
    StrictInt = int
else:
    StrictInt = Annotated[
        Any,
        Must(lambda value: type(value) is int and value > 0, "a whole number above 0, no float"),
    ]
InsideOne = Annotated[float, Range(0, 1, low_open=True, high_open=True)]


def exponential(rate: float, gamma: float, n: float) -> float:
    """Return rate * gamma^n."""
    return rate * float(gamma**n)


def natural_exp(rate: float, gamma: float, n: float) -> float:
    """Return rate * e^(-gamma * n)."""
    return rate * math.exp(-gamma * n)


def inverse_time(rate: float, gamma: float, n: float) -> float:
    """Return rate / (1 + gamma * n)."""
    return rate / (1 + gamma * n)


@schedule
class NoamDecay(LRScheduler):
    """Rises for warmup_steps epochs, then falls, as in "Attention is all you need" (2017).

    The rate is learning_rate * d_model^-0.5 * min(epoch^-0.5, epoch * warmup_steps^-1.5).
    """

    d_model: Positive
    warmup_steps: Positive
    learning_rate: NonNegative = 1.0
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        falling = 1.0 if self.last_epoch == 0 else self.last_epoch**-0.5
        rising = self.warmup_steps**-1.5 * self.last_epoch
        return self.base_lr * float(self.d_model**-0.5 * min(falling, rising))


@schedule
class PiecewiseDecay(LRScheduler):
    """Constant rates: values[i] until epoch boundaries[i], and the last value from then on.

        PiecewiseDecay([10, 20], [0.1, 0.01, 0.001])

    This schedule has the rate 0.1 in epochs 0 to 9, 0.01 in epochs 10 to 19, and then 0.001.
    """

    boundaries: Sequence[float]
    values: Sequence[NonNegative]
    last_epoch: Epoch = -1
    verbose: bool = False

    @override
    def _first_rate(self) -> float:
        if len(self.values) != len(self.boundaries) + 1:
            raise ConfigError(
                f"PiecewiseDecay: {len(self.boundaries)} boundaries need "
                f"{len(self.boundaries) + 1} values, there are {len(self.values)}"
            )
        _check_rising("PiecewiseDecay", "boundaries", self.boundaries)
        self.boundaries = list(self.boundaries)
        self.values = [float(value) for value in self.values]
        return self.values[0]

    def get_lr(self) -> float:
        for boundary, value in zip(self.boundaries, self.values, strict=False):
            if self.last_epoch < boundary:
                return value
        return self.values[-1]


@schedule
class NaturalExpDecay(LRScheduler):
    """Exponential fall: the rate is learning_rate * e^(-gamma * epoch)."""

    learning_rate: NonNegative
    gamma: Positive
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        return natural_exp(self.base_lr, self.gamma, self.last_epoch)


@schedule
class InverseTimeDecay(LRScheduler):
    """Fall with the inverse of time: the rate is learning_rate / (1 + gamma * epoch)."""

    learning_rate: NonNegative
    gamma: NonNegative
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        return inverse_time(self.base_lr, self.gamma, self.last_epoch)


@schedule
class PolynomialDecay(LRScheduler):
    """Fall from learning_rate to end_lr in decay_steps epochs.

    The rate is end_lr + (learning_rate - end_lr) * (1 - epoch / decay_steps)^power, and then stays at
    end_lr. With `cycle` the rate jumps up after every decay_steps epochs and falls again: decay_steps in
    the formula is then the next multiple of decay_steps.
    """

    learning_rate: NonNegative
    decay_steps: Positive
    end_lr: NonNegative = 0.0001
    power: Positive = 1.0
    cycle: bool = False
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        epoch: float = self.last_epoch
        length = self.decay_steps
        if self.cycle:
            length *= max(1, math.ceil(epoch / length))
        else:
            epoch = min(epoch, length)
        remaining_share = float((1 - epoch / length) ** self.power)
        return (self.base_lr - self.end_lr) * remaining_share + self.end_lr


@schedule
class ExponentialDecay(LRScheduler):
    """Exponential fall: the rate is learning_rate * gamma^epoch."""

    learning_rate: NonNegative
    gamma: InsideOne
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        return exponential(self.base_lr, self.gamma, self.last_epoch)


@schedule
class MultiStepDecay(LRScheduler):
    """Falls in steps: the rate is multiplied by gamma at every epoch in `milestones`."""

    learning_rate: NonNegative
    milestones: Sequence[float]
    gamma: BelowOne = 0.1
    last_epoch: Epoch = -1
    verbose: bool = False

    @override
    def _first_rate(self) -> float:
        _check_rising("MultiStepDecay", "milestones", self.milestones)
        self.milestones = list(self.milestones)
        return self.learning_rate

    def get_lr(self) -> float:
        count = sum(self.last_epoch >= milestone for milestone in self.milestones)
        return exponential(self.base_lr, self.gamma, count)


@schedule
class StepDecay(LRScheduler):
    """Falls in steps: the rate is multiplied by gamma after every step_size epochs."""

    learning_rate: NonNegative
    step_size: PositiveInt
    gamma: BelowOne = 0.1
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        return exponential(self.base_lr, self.gamma, self.last_epoch // self.step_size)


@schedule
class LambdaDecay(LRScheduler):
    """Rate learning_rate * lr_lambda(epoch) with a function of your own."""

    learning_rate: NonNegative
    lr_lambda: Callable[[int], float]
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        return self.base_lr * self._reply("lr_lambda", self.lr_lambda(self.last_epoch))


@schedule
class MultiplicativeDecay(LRScheduler):
    """Rate that each epoch multiplies by lr_lambda(epoch): learning_rate * lr_lambda(1) * ... *
    lr_lambda(epoch).
    """

    learning_rate: NonNegative
    lr_lambda: Callable[[int], float]
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        rate = self.base_lr
        for epoch in range(1, self.last_epoch + 1):
            rate *= self._reply("lr_lambda", self.lr_lambda(epoch))
        return rate


@schedule
class CosineAnnealingDecay(LRScheduler):
    """Fall from learning_rate to eta_min along half a cosine in T_max epochs, then back up, and so on."""

    learning_rate: NonNegative
    T_max: PositiveInt
    eta_min: NonNegative = 0
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        """Return the rate of this epoch, computed from the previous epoch's rate as Paddle does."""
        # With r = rate - eta_min, (1 + cos(pi * t / T)) / (1 + cos(pi * (t - 1) / T)) is the ratio of r in
        # epochs t and t - 1. Just after the minimum the divisor is 0. The first rise is then added instead.
        if self.last_epoch == 0:
            return self.base_lr
        if (self.last_epoch - 1 - self.T_max) % (2 * self.T_max) == 0:
            rise = (1 - math.cos(math.pi / self.T_max)) / 2
            return self.last_lr + (self.base_lr - self.eta_min) * rise
        now = 1 + math.cos(math.pi * self.last_epoch / self.T_max)
        before = 1 + math.cos(math.pi * (self.last_epoch - 1) / self.T_max)
        return now / before * (self.last_lr - self.eta_min) + self.eta_min


@schedule
class CosineAnnealingWarmRestarts(LRScheduler):
    """Fall from learning_rate to eta_min along half a cosine, again and again.

    The first fall takes T_0 epochs, and each further fall T_mult times as many as the previous one.
    """

    _kept = ("last_epoch", "last_lr", "T_i", "T_cur")

    learning_rate: NonNegative
    T_0: StrictInt
    T_mult: StrictInt = 1
    eta_min: NonNegative = 0
    last_epoch: Epoch = -1
    verbose: bool = False

    @override
    def _first_rate(self) -> float:
        self.T_i = self.T_0
        self.T_cur = self.last_epoch
        return self.learning_rate

    def get_lr(self) -> float:
        fall = (1 + math.cos(math.pi * self.T_cur / self.T_i)) / 2
        return self.eta_min + (self.base_lr - self.eta_min) * fall

    def _go_to(self, epoch: Any) -> None:
        super()._go_to(epoch)
        self.T_cur, self.T_i = self.last_epoch, self.T_0
        while self.T_cur >= self.T_i:
            self.T_cur -= self.T_i
            self.T_i *= self.T_mult


def _check_rising(owner: str, name: str, values: Sequence[float]) -> None:
    if any(a >= b for a, b in itertools.pairwise(values)):
        raise ConfigError(f"{owner}: {name} are {list(values)}, they must increase")


@schedule
class LinearWarmup(LRScheduler):
    """Rise from start_lr to end_lr in warmup_steps epochs. Afterwards the rate is `learning_rate`.

    Args:
        learning_rate: Rate after the warm-up: a number or a schedule.
        warmup_steps: Number of epochs of the rise.
        start_lr, end_lr: Rates at the begin and the end of the rise.
        last_epoch: Last epoch of an earlier run to continue, or -1 to start.
        verbose: True to print the rate at each step.
    """

    learning_rate: NonNegative | LRScheduler
    warmup_steps: NonNegativeInt
    start_lr: NonNegative
    end_lr: NonNegative
    last_epoch: Epoch = -1
    verbose: bool = False

    @override
    def _first_rate(self) -> float:
        if self.end_lr <= self.start_lr:
            raise ConfigError(
                f"LinearWarmup: end_lr is {self.end_lr!r}, it must be above start_lr "
                f"{self.start_lr!r}"
            )
        return self.start_lr

    def get_lr(self) -> float:
        if self.last_epoch < self.warmup_steps:
            part = self.last_epoch / self.warmup_steps
            return (self.end_lr - self.start_lr) * part + self.start_lr
        if isinstance(self.learning_rate, LRScheduler):
            self.learning_rate.step(self.last_epoch - self.warmup_steps)
            return self.learning_rate.last_lr
        return self.learning_rate

    def state_dict(self) -> dict[str, object]:
        """Return the state. If `learning_rate` is a schedule, `LinearWarmup_LR` contains that schedule's
        state."""
        state = super().state_dict()
        if isinstance(self.learning_rate, LRScheduler):
            state["LinearWarmup_LR"] = self.learning_rate.state_dict()
        return state

    @checked
    def set_state_dict(self, state_dict: dict[str, object]) -> None:
        """Continue from a state made by `state_dict()`, also the schedule passed as `learning_rate`."""
        super().set_state_dict(state_dict)
        inner = state_dict.get("LinearWarmup_LR")
        if isinstance(self.learning_rate, LRScheduler) and isinstance(inner, dict):
            self.learning_rate.set_state_dict(inner)


@schedule
class LinearLR(LRScheduler):
    """Rate learning_rate * f, where f changes linearly from start_factor to end_factor.

    The change takes `total_steps` calls of `step()`. Afterwards f stays at end_factor.
    """

    learning_rate: NonNegative
    total_steps: PositiveInt
    start_factor: Annotated[float, Range(0, 1, low_open=True)] = 1.0 / 3
    end_factor: Annotated[float, Range(0, 1)] = 1.0
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        part = min(self.last_epoch, self.total_steps) / self.total_steps
        return self.base_lr * (self.start_factor + (self.end_factor - self.start_factor) * part)


@schedule
class OneCycleLR(LRScheduler):
    """Rise to max_learning_rate and fall to end_learning_rate, in total_steps epochs.

    The rate starts at max_learning_rate / divide_factor. It rises during the first phase_pct * total_steps
    epochs and falls to end_learning_rate in the remaining epochs. With `three_phase` it falls in two parts:
    to the rate at the start in as many epochs as it rose, then to end_learning_rate.
    """

    max_learning_rate: NonNegative
    total_steps: PositiveInt
    divide_factor: Positive = 25.0
    end_learning_rate: NonNegative = 0.0001
    phase_pct: Annotated[float, Range(0, 1)] = 0.3
    anneal_strategy: Literal["cos", "linear"] = "cos"
    three_phase: bool = False
    last_epoch: Epoch = -1
    verbose: bool = False

    @override
    def _first_rate(self) -> float:
        if self.three_phase and self.phase_pct > 0.5:
            raise ConfigError(
                f"OneCycleLR: phase_pct is {self.phase_pct!r}, it must be at most 0.5 with three "
                "phases"
            )
        top, end = self.max_learning_rate, float(self.end_learning_rate)
        start = top / self.divide_factor
        turn = self.phase_pct * self.total_steps
        if self.three_phase:
            self.turns = [0, turn - 1, 2 * turn - 2, self.total_steps - 1]
            self.rates = [start, top, start, end]
        else:
            self.turns = [0, turn - 1, self.total_steps - 1]
            self.rates = [start, top, end]
        self.way = _WAYS[self.anneal_strategy]
        return start

    def get_lr(self) -> float:
        if self.last_epoch > self.total_steps:
            raise ConfigError(
                f"OneCycleLR: epoch is {self.last_epoch}, "
                f"but the cycle has total_steps {self.total_steps}"
            )
        for i in range(1, len(self.turns)):
            if self.last_epoch <= self.turns[i] or i == len(self.turns) - 1:
                length = self.turns[i] - self.turns[i - 1]
                part = (self.last_epoch - self.turns[i - 1]) / length if length else 1.0
                return self.way(self.rates[i - 1], self.rates[i], part)
        raise AssertionError("unreachable: the last phase takes every epoch")


def _cosine(start: float, end: float, part: float) -> float:
    return end + (start - end) / 2.0 * (1 + math.cos(math.pi * part))


def _linear(start: float, end: float, part: float) -> float:
    return (end - start) * part + start


_WAYS: dict[str, Callable[[float, float, float], float]] = {"cos": _cosine, "linear": _linear}


@schedule
class CyclicLR(LRScheduler):
    """Cycles from base_learning_rate up to max_learning_rate and down again.

    A cycle rises for `step_size_up` epochs and falls for `step_size_down`, by default as many. The mode says
    how the height of the cycles changes: not at all (`triangular`), by 1/2 after each cycle (`triangular2`),
    or by the factor exp_gamma every epoch (`exp_range`).

    `scale_fn` replaces the mode. It returns the factor on the height. With scale_mode `cycle` its argument is
    the number of the cycle, with `iterations` the number of the epoch.
    """

    base_learning_rate: NonNegative
    max_learning_rate: NonNegative
    step_size_up: PositiveInt
    step_size_down: PositiveInt | None = None
    mode: str = "triangular"
    exp_gamma: NonNegative = 1.0
    scale_fn: Callable[[float], float] | None = None
    scale_mode: Literal["cycle", "iterations"] = "cycle"
    last_epoch: Epoch = -1
    verbose: bool = False

    @override
    def _first_rate(self) -> float:
        down = self.step_size_up if self.step_size_down is None else self.step_size_down
        if self.scale_fn is None and self.mode not in ("triangular", "triangular2", "exp_range"):
            raise ConfigError(
                f"CyclicLR: mode is {self.mode!r}, use triangular, triangular2 or exp_range"
            )
        self.cycle_size = self.step_size_up + down
        self.up = self.step_size_up / self.cycle_size
        self.max_lr = float(self.max_learning_rate)
        return self.base_learning_rate

    def get_lr(self) -> float:
        cycle = 1 + self.last_epoch // self.cycle_size
        phase = 1.0 + self.last_epoch / self.cycle_size - cycle
        height = phase / self.up if phase <= self.up else (1 - phase) / (1 - self.up)
        return self.base_lr + (self.max_lr - self.base_lr) * height * self._scale(cycle)

    def _scale(self, cycle: int) -> float:
        if self.scale_fn is not None:
            cycle_or_epoch = cycle if self.scale_mode == "cycle" else self.last_epoch
            return self._reply("scale_fn", self.scale_fn(cycle_or_epoch))
        if self.mode == "triangular2":
            return 1 / 2.0 ** (cycle - 1)
        return float(self.exp_gamma**self.last_epoch) if self.mode == "exp_range" else 1.0
