"""Schedules of eager mode under their older names.

Those that count updates are advanced by the optimizer, and by each call: `decay()` gives the current
rate and goes on. Those that count epochs are advanced by `epoch()`.
"""

from collections.abc import Callable, Sequence
from typing import Annotated

from psfleet.optimizer import lr
from psfleet.optimizer.lr.decay import BelowOne
from psfleet.optimizer.lr.scheduler import LRScheduler
from psfleet.optimizer.lr.update_counted import PerUpdateSchedule
from psfleet.validation.annotations import (
    Must,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Range,
    checked,
)

__all__ = [
    "CosineDecay",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LambdaDecay",
    "LinearLrWarmup",
    "MultiStepDecay",
    "NaturalExpDecay",
    "NoamDecay",
    "PiecewiseDecay",
    "PolynomialDecay",
    "ReduceLROnPlateau",
    "StepDecay",
]

Mode = Annotated[str, Must(lambda v: v.lower() in ("min", "max"), "min or max")]
Measure = Annotated[str, Must(lambda v: v.lower() in ("rel", "abs"), "rel or abs")]


class _PerUpdateSchedule(PerUpdateSchedule):
    """An older schedule at begin + step * (updates before this one)."""

    def __init__(self, older: PerUpdateSchedule, begin: int, step: int) -> None:
        super().__init__(older.base_lr, lambda n: older.rate(begin + step * n))

    def __call__(self) -> float:
        """The current rate; the next call, or update, has the one after it."""
        rate = self.last_lr
        self.step()
        return rate


class NoamDecay(_PerUpdateSchedule):
    """learning_rate * d_model^-0.5 * min(n^-0.5, n * warmup_steps^-1.5), n from `begin`."""

    @checked
    def __init__(
        self,
        d_model: Positive,
        warmup_steps: Positive,
        begin: NonNegativeInt = 1,
        step: PositiveInt = 1,
        dtype: str = "float32",
        learning_rate: NonNegative = 1.0,
    ) -> None:
        super().__init__(lr.noam_decay(d_model, warmup_steps, learning_rate), begin, step)


class PiecewiseDecay(_PerUpdateSchedule):
    """values[i] until update boundaries[i], the last value from then on."""

    @checked
    def __init__(
        self,
        boundaries: Sequence[float],
        values: Sequence[NonNegative],
        begin: NonNegativeInt,
        step: PositiveInt = 1,
        dtype: str = "float32",
    ) -> None:
        super().__init__(lr.piecewise_decay(boundaries, values), begin, step)


class ExponentialDecay(_PerUpdateSchedule):
    """As lr.exponential_decay."""

    @checked
    def __init__(
        self,
        learning_rate: NonNegative,
        decay_steps: Positive,
        decay_rate: Positive,
        staircase: bool = False,
        begin: NonNegativeInt = 0,
        step: PositiveInt = 1,
        dtype: str = "float32",
    ) -> None:
        older = lr.exponential_decay(learning_rate, decay_steps, decay_rate, staircase)
        super().__init__(older, begin, step)


class NaturalExpDecay(_PerUpdateSchedule):
    """As lr.natural_exp_decay."""

    @checked
    def __init__(
        self,
        learning_rate: NonNegative,
        decay_steps: Positive,
        decay_rate: NonNegative,
        staircase: bool = False,
        begin: NonNegativeInt = 0,
        step: PositiveInt = 1,
        dtype: str = "float32",
    ) -> None:
        older = lr.natural_exp_decay(learning_rate, decay_steps, decay_rate, staircase)
        super().__init__(older, begin, step)


class InverseTimeDecay(_PerUpdateSchedule):
    """As lr.inverse_time_decay."""

    @checked
    def __init__(
        self,
        learning_rate: NonNegative,
        decay_steps: Positive,
        decay_rate: NonNegative,
        staircase: bool = False,
        begin: NonNegativeInt = 0,
        step: PositiveInt = 1,
        dtype: str = "float32",
    ) -> None:
        older = lr.inverse_time_decay(learning_rate, decay_steps, decay_rate, staircase)
        super().__init__(older, begin, step)


class PolynomialDecay(_PerUpdateSchedule):
    """As lr.polynomial_decay."""

    @checked
    def __init__(
        self,
        learning_rate: NonNegative,
        decay_steps: Positive,
        end_learning_rate: NonNegative = 0.0001,
        power: Positive = 1.0,
        cycle: bool = False,
        begin: NonNegativeInt = 0,
        step: PositiveInt = 1,
        dtype: str = "float32",
    ) -> None:
        older = lr.polynomial_decay(learning_rate, decay_steps, end_learning_rate, power, cycle)
        super().__init__(older, begin, step)


class CosineDecay(_PerUpdateSchedule):
    """As lr.cosine_decay."""

    @checked
    def __init__(
        self,
        learning_rate: NonNegative,
        step_each_epoch: Positive,
        epochs: Positive,
        begin: NonNegativeInt = 0,
        step: PositiveInt = 1,
        dtype: str = "float32",
    ) -> None:
        super().__init__(lr.cosine_decay(learning_rate, step_each_epoch, epochs), begin, step)


class LinearLrWarmup(_PerUpdateSchedule):
    """From start_lr to end_lr in warmup_steps updates, then `learning_rate`, or that schedule."""

    @checked
    def __init__(
        self,
        learning_rate: NonNegative | LRScheduler,
        warmup_steps: NonNegative,
        start_lr: NonNegative,
        end_lr: NonNegative,
        begin: NonNegativeInt = 1,
        step: PositiveInt = 1,
        dtype: str = "float32",
    ) -> None:
        older = lr.linear_lr_warmup(learning_rate, warmup_steps, start_lr, end_lr)
        super().__init__(older, begin, step)


class StepDecay(lr.StepDecay):
    """learning_rate times decay_rate after every step_size epochs."""

    @checked
    def __init__(
        self, learning_rate: NonNegative, step_size: PositiveInt, decay_rate: BelowOne = 0.1
    ) -> None:
        super().__init__(learning_rate, step_size, decay_rate)

    def epoch(self, epoch: int | None = None) -> None:
        """As `step`."""
        self.step(epoch)


class MultiStepDecay(lr.MultiStepDecay):
    """learning_rate times decay_rate for every milestone that has been reached."""

    @checked
    def __init__(
        self, learning_rate: NonNegative, milestones: Sequence[float], decay_rate: BelowOne = 0.1
    ) -> None:
        super().__init__(learning_rate, milestones, decay_rate)

    def epoch(self, epoch: int | None = None) -> None:
        """As `step`."""
        self.step(epoch)


class LambdaDecay(lr.LambdaDecay):
    """learning_rate * lr_lambda(epoch)."""

    @checked
    def __init__(self, learning_rate: NonNegative, lr_lambda: Callable[[int], float]) -> None:
        super().__init__(learning_rate, lr_lambda)

    def epoch(self, epoch: int | None = None) -> None:
        """As `step`."""
        self.step(epoch)


class ReduceLROnPlateau(lr.ReduceOnPlateau):
    """lr.ReduceOnPlateau with the older arguments."""

    @checked
    def __init__(
        self,
        learning_rate: NonNegative,
        mode: Mode = "min",
        decay_rate: Annotated[float, Range(0, 1, high_open=True)] = 0.1,
        patience: NonNegativeInt = 10,
        verbose: bool = False,
        threshold: NonNegative = 1e-4,
        threshold_mode: Measure = "rel",
        cooldown: NonNegativeInt = 0,
        min_lr: NonNegative = 0,
        eps: NonNegative = 1e-8,
        dtype: str = "float32",
    ) -> None:
        super().__init__(
            learning_rate,
            mode,
            decay_rate,
            patience,
            threshold,
            threshold_mode,
            cooldown,
            min_lr,
            eps,
            verbose,
        )
