"""Schedules in which the rate falls, or is cut at given epochs."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from typing_extensions import override

from psfleet.errors import ConfigError
from psfleet.optimizer.lr.scheduler import Epoch, LRScheduler, schedule
from psfleet.validation.annotations import NonNegative, Positive, PositiveInt, Range

BelowOne = Annotated[float, Range(0, 1, high_open=True)]
InsideOne = Annotated[float, Range(0, 1, low_open=True, high_open=True)]


def exponential(rate: float, gamma: float, n: float) -> float:
    """Compute rate * gamma^n."""
    return rate * float(gamma**n)


def natural_exp(rate: float, gamma: float, n: float) -> float:
    """Compute rate * e^(-gamma * n)."""
    return rate * math.exp(-gamma * n)


def inverse_time(rate: float, gamma: float, n: float) -> float:
    """Compute rate / (1 + gamma * n)."""
    return rate / (1 + gamma * n)


@schedule
class NoamDecay(LRScheduler):
    """learning_rate * d_model^-0.5 * min(epoch^-0.5, epoch * warmup_steps^-1.5)."""

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
    """values[i] until epoch boundaries[i], the last value from then on."""

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
    """learning_rate * e^(-gamma * epoch)."""

    learning_rate: NonNegative
    gamma: Positive
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        return natural_exp(self.base_lr, self.gamma, self.last_epoch)


@schedule
class InverseTimeDecay(LRScheduler):
    """learning_rate / (1 + gamma * epoch)."""

    learning_rate: NonNegative
    gamma: NonNegative
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        return inverse_time(self.base_lr, self.gamma, self.last_epoch)


@schedule
class PolynomialDecay(LRScheduler):
    """From learning_rate to end_lr in decay_steps epochs, along (1 - epoch / decay_steps)^power.

    With `cycle` the way is stretched to the next multiple of decay_steps instead of ending.
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
        rest = float((1 - epoch / length) ** self.power)
        return (self.base_lr - self.end_lr) * rest + self.end_lr


@schedule
class ExponentialDecay(LRScheduler):
    """learning_rate * gamma^epoch."""

    learning_rate: NonNegative
    gamma: InsideOne
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        return exponential(self.base_lr, self.gamma, self.last_epoch)


@schedule
class MultiStepDecay(LRScheduler):
    """learning_rate times gamma for every milestone that has been reached."""

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
    """learning_rate times gamma after every step_size epochs."""

    learning_rate: NonNegative
    step_size: PositiveInt
    gamma: BelowOne = 0.1
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        return exponential(self.base_lr, self.gamma, self.last_epoch // self.step_size)


@schedule
class LambdaDecay(LRScheduler):
    """learning_rate * lr_lambda(epoch)."""

    learning_rate: NonNegative
    lr_lambda: Callable[[int], float]
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        return self.base_lr * self._reply("lr_lambda", self.lr_lambda(self.last_epoch))


@schedule
class MultiplicativeDecay(LRScheduler):
    """learning_rate * lr_lambda(1) * ... * lr_lambda(epoch)."""

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
    """Half a cosine from learning_rate to eta_min in T_max epochs, and back, and on."""

    learning_rate: NonNegative
    T_max: PositiveInt
    eta_min: NonNegative = 0
    last_epoch: Epoch = -1
    verbose: bool = False

    def get_lr(self) -> float:
        """A step from the rate before it, as in the reference."""
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
    """Half a cosine to eta_min in T_0 epochs, then again T_mult times as long, and on."""

    _kept = ("last_epoch", "last_lr", "T_i", "T_cur")

    learning_rate: NonNegative
    T_0: PositiveInt
    T_mult: PositiveInt = 1
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
