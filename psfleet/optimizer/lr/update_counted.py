"""Learning-rate schedules that count updates: noam_decay, exponential_decay and other functions.

    optimizer = SGD(exponential_decay(0.1, decay_steps=1000, decay_rate=0.5))

The optimizer advances such a schedule after each update, so the script does not call `step()`. A program
can use the schedule as a variable, to fetch the rate or to compute with it. The names are those of older
Paddle versions. Most functions have the formula of a class in `schedules.py`, with updates in place of
epochs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from psfleet.core.base.validation.annotations import NonNegative, Positive, checked
from psfleet.optimizer.lr.scheduler import LRScheduler
from psfleet.optimizer.lr.schedules import (
    NoamDecay,
    PiecewiseDecay,
    PolynomialDecay,
    exponential,
    inverse_time,
    natural_exp,
)


class PerUpdateSchedule(LRScheduler):
    """Schedule whose rate is a function of the number of updates so far.

        rate = exponential_decay(0.1, 1000, 0.5) * 2  # arithmetic gives another schedule
        exe.run(feed=feed, fetch_list=[loss, rate])

    In a program the schedule can be an input of a layer or be fetched. Its value is then the rate of the
    run's update.

    Args:
        rate: Function that returns the rate after n updates when called with `first` + n.
        first: Value of `last_epoch` before the first update.
    """

    steps_itself = True

    @checked
    def __init__(
        self, learning_rate: NonNegative, rate: Callable[[int], float], first: int = 0
    ) -> None:
        self.rate = rate
        self.first = first
        self._label = ""
        super().__init__(learning_rate, first - 1)

    def get_lr(self) -> float:
        return self.rate(self.last_epoch)

    def after(self, updates: int) -> float:
        """Return the rate after a number of updates."""
        return self.rate(self.first + updates)

    def as_variable(self, program: Any = None) -> Any:
        """Return a variable of a program with the schedule's rate. In eager mode return the present rate.

        Args:
            program: Program of the variable, or None for the default main program.
        """
        from psfleet.core.graph.program import names
        from psfleet.core.graph.program.ops.manipulate import PerRun
        from psfleet.core.graph.program.program import (
            default_main_program,
            in_eager_mode,
            program_guard,
        )
        from psfleet.core.graph.program.variable import apply, to_variable

        if program is None and in_eager_mode():
            return to_variable([self.last_lr])
        program = program or default_main_program()
        self._label = self._label or names.generate("learning_rate")
        variable = program.variables.get(f"{self._label}.tmp_0")
        if variable is not None:
            return variable
        with program_guard(program), names.guard():
            return apply(PerRun(self.after), name=self._label)

    def _with(
        self, operand: Any, combine: Callable[[float, float], float], swap: bool = False
    ) -> Any:
        """Return a schedule that combines this rate with a number or with the rate of another schedule.

        Args:
            operand: Number or schedule. A schedule is evaluated after the same number of updates.
            swap: True to pass the operand's rate first.
        """
        if isinstance(operand, bool) or not isinstance(operand, int | float | PerUpdateSchedule):
            return NotImplemented
        then: Callable[[int], float] = (
            operand.after if isinstance(operand, PerUpdateSchedule) else lambda _: float(operand)
        )
        if swap:
            return PerUpdateSchedule(self.base_lr, lambda n: combine(then(n), self.after(n)))
        return PerUpdateSchedule(self.base_lr, lambda n: combine(self.after(n), then(n)))

    def __add__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a + b)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a - b)

    def __rsub__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a - b, swap=True)

    def __mul__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a * b)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a / b)

    def __rtruediv__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a / b, swap=True)


@checked
def noam_decay(
    d_model: Positive, warmup_steps: Positive, learning_rate: NonNegative = 1.0
) -> PerUpdateSchedule:
    """Rise for warmup_steps updates, then fall: NoamDecay with updates in place of epochs.

    The rate of update n, counted from 1, is learning_rate * d_model^-0.5 * min(n^-0.5, n *
    warmup_steps^-1.5).
    """
    return _counting(NoamDecay(d_model, warmup_steps, learning_rate), first=1)


@checked
def exponential_decay(
    learning_rate: NonNegative, decay_steps: Positive, decay_rate: Positive, staircase: bool = False
) -> PerUpdateSchedule:
    """Exponential fall: the rate after n updates is learning_rate * decay_rate^(n / decay_steps).

    `staircase` rounds n / decay_steps down.
    """
    return _scaled(exponential, learning_rate, decay_steps, decay_rate, staircase)


@checked
def natural_exp_decay(
    learning_rate: NonNegative,
    decay_steps: Positive,
    decay_rate: NonNegative,
    staircase: bool = False,
) -> PerUpdateSchedule:
    """Exponential fall: the rate after n updates is learning_rate * e^(-decay_rate * n / decay_steps).

    `staircase` rounds n / decay_steps down.
    """
    return _scaled(natural_exp, learning_rate, decay_steps, decay_rate, staircase)


@checked
def inverse_time_decay(
    learning_rate: NonNegative,
    decay_steps: Positive,
    decay_rate: NonNegative,
    staircase: bool = False,
) -> PerUpdateSchedule:
    """Fall with the inverse of time: the rate after n updates is
    learning_rate / (1 + decay_rate * n / decay_steps).

    `staircase` rounds n / decay_steps down.
    """
    return _scaled(inverse_time, learning_rate, decay_steps, decay_rate, staircase)


@checked
def polynomial_decay(
    learning_rate: NonNegative,
    decay_steps: Positive,
    end_learning_rate: NonNegative = 0.0001,
    power: Positive = 1.0,
    cycle: bool = False,
) -> PerUpdateSchedule:
    """Fall from learning_rate to end_learning_rate in decay_steps updates: PolynomialDecay with updates in
    place of epochs.
    """
    return _counting(PolynomialDecay(learning_rate, decay_steps, end_learning_rate, power, cycle))


@checked
def piecewise_decay(
    boundaries: Sequence[float], values: Sequence[NonNegative]
) -> PerUpdateSchedule:
    """Constant rates: values[i] until update boundaries[i], and the last value from then on."""
    return _counting(PiecewiseDecay(boundaries, values))


@checked
def cosine_decay(
    learning_rate: NonNegative, step_each_epoch: Positive, epochs: Positive
) -> PerUpdateSchedule:
    """Fall from learning_rate to 0 along half a cosine, in `epochs` epochs of step_each_epoch updates."""

    def rate(n: int) -> float:
        epoch = n // step_each_epoch
        return learning_rate * 0.5 * (math.cos(epoch * math.pi / epochs) + 1)

    return PerUpdateSchedule(learning_rate, rate)


@checked
def linear_lr_warmup(
    learning_rate: NonNegative | LRScheduler,
    warmup_steps: NonNegative,
    start_lr: NonNegative,
    end_lr: NonNegative,
) -> PerUpdateSchedule:
    """Rise from start_lr to end_lr in warmup_steps updates. Afterwards the rate is `learning_rate`.

    Args:
        learning_rate: Rate after the warm-up: a number or a schedule. As in Paddle, a schedule counts from
            the first update, not from the end of the warm-up.
        warmup_steps: Number of updates of the rise.
        start_lr, end_lr: Rates at the begin and the end of the rise.
    """

    def rate(n: int) -> float:
        if n < warmup_steps:
            return start_lr + (end_lr - start_lr) * n / warmup_steps
        if isinstance(learning_rate, LRScheduler):
            learning_rate.step(n + first)
            return learning_rate.last_lr
        return learning_rate

    first = learning_rate.last_epoch if isinstance(learning_rate, LRScheduler) else 0
    return PerUpdateSchedule(start_lr, rate)


def _counting(scheduler: LRScheduler, first: int = 0) -> PerUpdateSchedule:
    """Return a schedule with the formula of `scheduler`, but with updates in place of epochs.

    Args:
        first: Epoch whose rate the first update has.
    """

    def rate(n: int) -> float:
        scheduler.last_epoch = n
        return scheduler.get_lr()

    return PerUpdateSchedule(scheduler.base_lr, rate, first)


def _scaled(
    formula: Callable[[float, float, float], float],
    learning_rate: float,
    decay_steps: float,
    decay_rate: float,
    staircase: bool,
) -> PerUpdateSchedule:
    """Make a schedule from a formula whose last argument is n / decay_steps after n updates.

    Args:
        formula: Function of learning_rate, decay_rate and n / decay_steps.
        staircase: True to round n / decay_steps down.
    """

    def rate(n: int) -> float:
        periods = n // decay_steps if staircase else n / decay_steps
        return formula(learning_rate, decay_rate, periods)

    return PerUpdateSchedule(learning_rate, rate)
