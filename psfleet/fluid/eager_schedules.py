"""Learning-rate schedules under Paddle's older names in eager mode (`fluid.dygraph.NoamDecay`, ...).

There are two kinds. Schedules that count updates are advanced by the optimizer. A call, as in `decay()`,
returns the present rate and advances the schedule too. Schedules that count epochs are advanced by
`epoch()`. The classes only rename and reorder the arguments of psfleet.optimizer.lr; their constructors are
made from those signatures.
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
    """Base of schedules that count updates.

    A subclass wraps a schedule of psfleet.optimizer.lr. After n updates it has the rate of the wrapped
    schedule after begin + step * n updates.

    `older` is the function that makes the wrapped schedule. The subclass's constructor has the arguments of
    this function and also `begin`, `step` and `dtype`: after the first `place` arguments, or at the end if
    `place` is None.
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
        """Return the present rate, and advance the schedule to the next one."""
        rate = self.last_lr
        self.step()
        return rate


class NoamDecay(_PerUpdateSchedule, older=lr.noam_decay, begin=1, place=2):
    """Rises for warmup_steps updates, then falls.

    The rate is learning_rate * d_model^-0.5 * min(n^-0.5, n * warmup_steps^-1.5) with n = begin + step *
    updates.
    """


class PiecewiseDecay(_PerUpdateSchedule, older=lr.piecewise_decay, begin=Parameter.empty):
    """Constant rates: values[i] until update boundaries[i], and the last value from then on."""


class ExponentialDecay(_PerUpdateSchedule, older=lr.exponential_decay):
    """Exponential fall, as lr.exponential_decay."""


class NaturalExpDecay(_PerUpdateSchedule, older=lr.natural_exp_decay):
    """Exponential fall with base e, as lr.natural_exp_decay."""


class InverseTimeDecay(_PerUpdateSchedule, older=lr.inverse_time_decay):
    """Fall with the inverse of the number of updates, as lr.inverse_time_decay."""


class PolynomialDecay(_PerUpdateSchedule, older=lr.polynomial_decay):
    """Fall by a polynomial of the number of updates, as lr.polynomial_decay."""


class CosineDecay(_PerUpdateSchedule, older=lr.cosine_decay):
    """Fall to 0 along half a cosine, as lr.cosine_decay."""


class LinearLrWarmup(_PerUpdateSchedule, older=lr.linear_lr_warmup, begin=1):
    """Rise from start_lr to end_lr in warmup_steps updates. Then the rate is `learning_rate`: a number or a
    schedule.
    """


def _with_arguments(order: str, *ignored: Parameter) -> Callable[[type[S]], type[S]]:
    """Class decorator that gives a schedule its older constructor: other order and names of the arguments.

    Args:
        order: Names of the arguments in the older order, separated by spaces. `gamma:decay_rate` renames
            `gamma` to `decay_rate`.
        ignored: Further arguments at the end. They are accepted for Paddle scripts, without effect.
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
        """Go to the next epoch, as `step` does."""
        self.step(epoch)


@_with_arguments("learning_rate step_size gamma:decay_rate")
class StepDecay(_PerEpochSchedule, lr.StepDecay):
    """Falls in steps: the rate is multiplied by decay_rate after every step_size epochs."""


@_with_arguments("learning_rate milestones gamma:decay_rate")
class MultiStepDecay(_PerEpochSchedule, lr.MultiStepDecay):
    """Falls in steps: the rate is multiplied by decay_rate at every epoch in `milestones`."""


@_with_arguments("learning_rate lr_lambda")
class LambdaDecay(_PerEpochSchedule, lr.LambdaDecay):
    """Rate learning_rate * lr_lambda(epoch) with a function of your own."""


@_with_arguments(
    "learning_rate mode factor:decay_rate patience verbose threshold threshold_mode cooldown min_lr "
    "epsilon:eps",
    argument("dtype", str, "float32"),
)
class ReduceLROnPlateau(lr.ReduceOnPlateau):
    """Schedule that reduces the rate when a metric stops improving: lr.ReduceOnPlateau with older
    arguments."""

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
