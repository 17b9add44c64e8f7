"""Schedules of eager mode under Paddle's older names (`fluid.dygraph.NoamDecay`, ...).

Schedules that count updates are advanced by the optimizer, and by each call: `decay()` returns the current
rate and goes on to the next. Schedules that count epochs are advanced by `epoch()`. The classes only rename
and reorder the arguments of psfleet.optimizer.lr; their constructors are made from its signatures.
"""

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import TYPE_CHECKING, Any, TypeVar

from psfleet.core.base.validation.annotations import NonNegativeInt, PositiveInt, checked
from psfleet.optimizer import lr
from psfleet.optimizer.lr.scheduler import LRScheduler, argument, set_constructor
from psfleet.optimizer.lr.update_counted import PerUpdateSchedule

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


S = TypeVar("S", bound=LRScheduler)


class _PerUpdateSchedule(PerUpdateSchedule):
    """Base of schedules that count updates: the rate of the older schedule at begin + step * n after n
    updates.

    A subclass names the function that makes the older schedule. Its constructor has the arguments of that
    function, with `begin`, `step` and `dtype` inserted after the first `place` of them, or at the end
    without `place`.
    """

    def __init_subclass__(
        cls,
        older: Callable[..., PerUpdateSchedule],
        begin: Any = 0,
        place: int | None = None,
        **class_options: Any,
    ) -> None:
        super().__init_subclass__(**class_options)
        arguments = [*inspect.signature(older).parameters.values()]
        shared_arguments = [
            argument("begin", NonNegativeInt, begin),
            argument("step", PositiveInt, 1),
            argument("dtype", str, "float32"),
        ]

        def construct(self: _PerUpdateSchedule, values: dict[str, Any]) -> None:
            begin, step, _ = (values.pop(shared.name) for shared in shared_arguments)
            older_schedule = older(**values)
            PerUpdateSchedule.__init__(
                self, older_schedule.base_lr, lambda n: older_schedule.rate(begin + step * n)
            )

        place = len(arguments) if place is None else place
        set_constructor(cls, [*arguments[:place], *shared_arguments, *arguments[place:]], construct)

    if TYPE_CHECKING:  # what `set_constructor` makes is checked when it is called

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self) -> float:
        """Return the current rate and advance, so that the next call or update gets the next rate."""
        rate = self.last_lr
        self.step()
        return rate


class NoamDecay(_PerUpdateSchedule, older=lr.noam_decay, begin=1, place=2):
    """Rate learning_rate * d_model^-0.5 * min(n^-0.5, n * warmup_steps^-1.5), for n from `begin` on."""


class PiecewiseDecay(_PerUpdateSchedule, older=lr.piecewise_decay, begin=Parameter.empty):
    """Rate values[i] until update boundaries[i], and the last value from then on."""


class ExponentialDecay(_PerUpdateSchedule, older=lr.exponential_decay):
    """Schedule as lr.exponential_decay."""


class NaturalExpDecay(_PerUpdateSchedule, older=lr.natural_exp_decay):
    """Schedule as lr.natural_exp_decay."""


class InverseTimeDecay(_PerUpdateSchedule, older=lr.inverse_time_decay):
    """Schedule as lr.inverse_time_decay."""


class PolynomialDecay(_PerUpdateSchedule, older=lr.polynomial_decay):
    """Schedule as lr.polynomial_decay."""


class CosineDecay(_PerUpdateSchedule, older=lr.cosine_decay):
    """Schedule as lr.cosine_decay."""


class LinearLrWarmup(_PerUpdateSchedule, older=lr.linear_lr_warmup, begin=1):
    """Rise from start_lr to end_lr in warmup_steps updates, then `learning_rate`, a number or a schedule."""


def _with_arguments(order: str, *ignored: Parameter) -> Callable[[type[S]], type[S]]:
    """Give a schedule the older constructor, with its arguments in another order and partly with other names.

    Args:
        order: Names of the arguments in the older order, separated by spaces. `gamma:decay_rate` gives
            `gamma` the name `decay_rate`.
        ignored: Further arguments at the end, which Paddle scripts pass and which have no effect.
    """
    names = {
        older or new_name: new_name
        for new_name, _, older in (name.partition(":") for name in order.split())
    }

    def decorate(kind: type[S]) -> type[S]:
        inherited: Callable[..., None] = kind.__init__
        inherited_parameters = inspect.signature(inherited).parameters
        arguments = [
            inherited_parameters[name].replace(name=older) for older, name in names.items()
        ]

        def construct(self: S, values: dict[str, Any]) -> None:
            inherited(self, **{name: values[older] for older, name in names.items()})

        set_constructor(kind, [*arguments, *ignored], construct)
        return kind

    return decorate


class _PerEpochSchedule(LRScheduler):
    """Base of schedules that count epochs. Adds `epoch`, the older name of `step`."""

    if TYPE_CHECKING:  # what `_with_arguments` makes is checked when it is called

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @checked
    def epoch(self, epoch: int | None = None) -> None:
        """Advance, as `step` does."""
        self.step(epoch)


@_with_arguments("learning_rate step_size gamma:decay_rate")
class StepDecay(_PerEpochSchedule, lr.StepDecay):
    """Rate that is multiplied by decay_rate after every step_size epochs."""


@_with_arguments("learning_rate milestones gamma:decay_rate")
class MultiStepDecay(_PerEpochSchedule, lr.MultiStepDecay):
    """Rate that is multiplied by decay_rate at every milestone."""


@_with_arguments("learning_rate lr_lambda")
class LambdaDecay(_PerEpochSchedule, lr.LambdaDecay):
    """Rate learning_rate * lr_lambda(epoch)."""


@_with_arguments(
    "learning_rate mode factor:decay_rate patience verbose threshold threshold_mode cooldown min_lr "
    "epsilon:eps",
    argument("dtype", str, "float32"),
)
class ReduceLROnPlateau(lr.ReduceOnPlateau):
    """Schedule as lr.ReduceOnPlateau, with the older arguments."""

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
