"""Schedules in which the rate falls, or is cut at given epochs."""

import itertools
import math
from collections.abc import Callable, Sequence

from psfleet.errors import ConfigError
from psfleet.optimizer.lr.base import LRScheduler, check_number, check_rate

__all__ = [
    "CosineAnnealingDecay",
    "CosineAnnealingWarmRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LambdaDecay",
    "MultiStepDecay",
    "MultiplicativeDecay",
    "NaturalExpDecay",
    "NoamDecay",
    "PiecewiseDecay",
    "PolynomialDecay",
    "StepDecay",
]


class NoamDecay(LRScheduler):
    """learning_rate * d_model^-0.5 * min(epoch^-0.5, epoch * warmup_steps^-1.5)."""

    def __init__(
        self,
        d_model: float,
        warmup_steps: int,
        learning_rate: float = 1.0,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        check_number("NoamDecay", "d_model", d_model, lambda v: v > 0, "above 0")
        check_number("NoamDecay", "warmup_steps", warmup_steps, lambda v: v > 0, "above 0")
        self.d_model = d_model
        self.warmup_steps = warmup_steps
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        falling = 1.0 if self.last_epoch == 0 else self.last_epoch**-0.5
        rising = self.warmup_steps**-1.5 * self.last_epoch
        return self.base_lr * float(self.d_model**-0.5 * min(falling, rising))


class PiecewiseDecay(LRScheduler):
    """values[i] until epoch boundaries[i], the last value from then on."""

    def __init__(
        self,
        boundaries: Sequence[int],
        values: Sequence[float],
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if len(values) != len(boundaries) + 1:
            raise ConfigError(
                f"PiecewiseDecay: {len(boundaries)} boundaries need "
                f"{len(boundaries) + 1} values, there are {len(values)}"
            )
        self.boundaries = list(boundaries)
        self.values = [check_rate("PiecewiseDecay", value, "a value") for value in values]
        super().__init__(self.values[0], last_epoch, verbose)

    def get_lr(self) -> float:
        for boundary, value in zip(self.boundaries, self.values, strict=False):
            if self.last_epoch < boundary:
                return value
        return self.values[-1]


class NaturalExpDecay(LRScheduler):
    """learning_rate * e^(-gamma * epoch)."""

    def __init__(
        self, learning_rate: float, gamma: float, last_epoch: int = -1, verbose: bool = False
    ) -> None:
        check_number("NaturalExpDecay", "gamma", gamma, lambda v: v > 0, "above 0")
        self.gamma = gamma
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        return self.base_lr * math.exp(-self.gamma * self.last_epoch)


class InverseTimeDecay(LRScheduler):
    """learning_rate / (1 + gamma * epoch)."""

    def __init__(
        self, learning_rate: float, gamma: float, last_epoch: int = -1, verbose: bool = False
    ) -> None:
        self.gamma = gamma
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        return self.base_lr / (1 + self.gamma * self.last_epoch)


class PolynomialDecay(LRScheduler):
    """From learning_rate to end_lr in decay_steps epochs, along (1 - epoch / decay_steps)^power.

    With `cycle` the way is stretched to the next multiple of decay_steps instead of ending.
    """

    def __init__(
        self,
        learning_rate: float,
        decay_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        check_number("PolynomialDecay", "decay_steps", decay_steps, lambda v: v > 0, "above 0")
        check_number("PolynomialDecay", "power", power, lambda v: v > 0, "above 0")
        self.decay_steps = decay_steps
        self.end_lr = check_rate("PolynomialDecay", end_lr, "end_lr")
        self.power = power
        self.cycle = cycle
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        epoch, length = self.last_epoch, self.decay_steps
        if self.cycle:
            length *= max(1, math.ceil(epoch / length))
        else:
            epoch = min(epoch, length)
        left = float((1 - epoch / length) ** self.power)
        return (self.base_lr - self.end_lr) * left + self.end_lr


class ExponentialDecay(LRScheduler):
    """learning_rate * gamma^epoch."""

    def __init__(
        self, learning_rate: float, gamma: float, last_epoch: int = -1, verbose: bool = False
    ) -> None:
        check_number("ExponentialDecay", "gamma", gamma, lambda v: 0 < v < 1, "in (0, 1)")
        self.gamma = gamma
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        return self.base_lr * float(self.gamma**self.last_epoch)


class MultiStepDecay(LRScheduler):
    """learning_rate times gamma for every milestone that has been reached."""

    def __init__(
        self,
        learning_rate: float,
        milestones: Sequence[int],
        gamma: float = 0.1,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not isinstance(milestones, Sequence):
            raise ConfigError(f"MultiStepDecay: milestones is {milestones!r}, it must be a list")
        if any(a >= b for a, b in itertools.pairwise(milestones)):
            raise ConfigError(
                f"MultiStepDecay: milestones are {list(milestones)}, they must increase"
            )
        check_number("MultiStepDecay", "gamma", gamma, lambda v: v < 1, "below 1")
        self.milestones = list(milestones)
        self.gamma = gamma
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        passed = sum(self.last_epoch >= milestone for milestone in self.milestones)
        return self.base_lr * float(self.gamma**passed)


class StepDecay(LRScheduler):
    """learning_rate times gamma after every step_size epochs."""

    def __init__(
        self,
        learning_rate: float,
        step_size: int,
        gamma: float = 0.1,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not (isinstance(step_size, int) and step_size > 0):
            raise ConfigError(
                f"StepDecay: step_size is {step_size!r}, it must be a whole number above 0"
            )
        check_number("StepDecay", "gamma", gamma, lambda v: v < 1, "below 1")
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        return self.base_lr * float(self.gamma ** (self.last_epoch // self.step_size))


class LambdaDecay(LRScheduler):
    """learning_rate * lr_lambda(epoch)."""

    def __init__(
        self,
        learning_rate: float,
        lr_lambda: Callable[[int], float],
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not callable(lr_lambda):
            raise ConfigError(
                f"LambdaDecay: lr_lambda is {lr_lambda!r}, it must be a function of the epoch"
            )
        self.lr_lambda = lr_lambda
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        return self.base_lr * self.lr_lambda(self.last_epoch)


class MultiplicativeDecay(LRScheduler):
    """learning_rate * lr_lambda(1) * ... * lr_lambda(epoch)."""

    def __init__(
        self,
        learning_rate: float,
        lr_lambda: Callable[[int], float],
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not callable(lr_lambda):
            raise ConfigError(
                f"MultiplicativeDecay: lr_lambda is {lr_lambda!r}, "
                "it must be a function of the epoch"
            )
        self.lr_lambda = lr_lambda
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        rate = self.base_lr
        for epoch in range(1, self.last_epoch + 1):
            rate *= self.lr_lambda(epoch)
        return rate


class CosineAnnealingDecay(LRScheduler):
    """Half a cosine from learning_rate to eta_min in T_max epochs, and back, and on."""

    def __init__(
        self,
        learning_rate: float,
        T_max: int,
        eta_min: float = 0,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        check_number("CosineAnnealingDecay", "T_max", T_max, lambda v: v > 0, "above 0")
        self.T_max = T_max
        self.eta_min = check_rate("CosineAnnealingDecay", eta_min, "eta_min")
        super().__init__(learning_rate, last_epoch, verbose)

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


class CosineAnnealingWarmRestarts(LRScheduler):
    """Half a cosine to eta_min in T_0 epochs, then again T_mult times as long, and on."""

    _kept = ("last_epoch", "last_lr", "T_i", "T_cur")

    def __init__(
        self,
        learning_rate: float,
        T_0: int,
        T_mult: int = 1,
        eta_min: float = 0,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not (isinstance(T_0, int) and T_0 > 0):
            raise ConfigError(
                f"CosineAnnealingWarmRestarts: T_0 is {T_0!r}, it must be a whole number above 0"
            )
        if not (isinstance(T_mult, int) and T_mult >= 1):
            raise ConfigError(
                f"CosineAnnealingWarmRestarts: T_mult is {T_mult!r}, "
                "it must be a whole number of at least 1"
            )
        self.T_0 = self.T_i = T_0
        self.T_mult = T_mult
        self.T_cur: float = last_epoch
        self.eta_min = check_rate("CosineAnnealingWarmRestarts", eta_min, "eta_min")
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        fall = (1 + math.cos(math.pi * self.T_cur / self.T_i)) / 2
        return self.eta_min + (self.base_lr - self.eta_min) * fall

    def step(self, epoch: int | None = None) -> None:
        """Go to the next epoch, or to `epoch`."""
        if epoch is not None and epoch < 0:
            raise ConfigError(
                f"CosineAnnealingWarmRestarts: epoch is {epoch!r}, it must be at least 0"
            )
        self.T_cur, self.T_i = self.last_epoch + 1 if epoch is None else epoch, self.T_0
        while self.T_cur >= self.T_i:
            self.T_cur -= self.T_i
            self.T_i *= self.T_mult
        super().step(epoch)
