"""Schedules of eager mode under their older names.

Those that count updates are advanced by the optimizer, and by each call: `decay()` gives the current
rate and goes on. Those that count epochs are advanced by `epoch()`.
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
    """An older schedule at begin + step * (updates before this one).

    A subclass names the function that makes the older schedule. Its constructor has the function's
    arguments, the first `place` of them before `begin`, `step` and `dtype`, and the others after these.
    """

    def __init_subclass__(
        cls,
        older: Callable[..., PerUpdateSchedule],
        begin: Any = 0,
        place: int | None = None,
        **more: Any,
    ) -> None:
        super().__init_subclass__(**more)
        arguments = [*inspect.signature(older).parameters.values()]
        own = [
            argument("begin", NonNegativeInt, begin),
            argument("step", PositiveInt, 1),
            argument("dtype", str, "float32"),
        ]

        def construct(self: _PerUpdateSchedule, values: dict[str, Any]) -> None:
            begin, step, _ = (values.pop(each.name) for each in own)
            older_schedule = older(**values)
            PerUpdateSchedule.__init__(
                self, older_schedule.base_lr, lambda n: older_schedule.rate(begin + step * n)
            )

        place = len(arguments) if place is None else place
        set_constructor(cls, [*arguments[:place], *own, *arguments[place:]], construct)

    if TYPE_CHECKING:  # what `set_constructor` makes is checked when it is called

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self) -> float:
        """The current rate; the next call, or update, has the one after it."""
        rate = self.last_lr
        self.step()
        return rate


class NoamDecay(_PerUpdateSchedule, older=lr.noam_decay, begin=1, place=2):
    """learning_rate * d_model^-0.5 * min(n^-0.5, n * warmup_steps^-1.5), n from `begin`."""


class PiecewiseDecay(_PerUpdateSchedule, older=lr.piecewise_decay, begin=Parameter.empty):
    """values[i] until update boundaries[i], the last value from then on."""


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
    """From start_lr to end_lr in warmup_steps updates, then `learning_rate`, or that schedule."""


def _with_arguments(order: str, *ignored: Parameter) -> Callable[[type[S]], type[S]]:
    """Give a schedule the older constructor: arguments of its own one, in this order, some by other names.

    Args:
        order: Names, separated by spaces; `gamma:decay_rate` is `gamma` by the name `decay_rate`.
        ignored: Arguments behind these, for scripts written for the reference.
    """
    names = {older or own: own for own, _, older in (name.partition(":") for name in order.split())}

    def decorate(kind: type[S]) -> type[S]:
        inherited: Callable[..., None] = kind.__init__
        own = inspect.signature(inherited).parameters
        arguments = [own[name].replace(name=older) for older, name in names.items()]

        def construct(self: S, values: dict[str, Any]) -> None:
            inherited(self, **{name: values[older] for older, name in names.items()})

        set_constructor(kind, [*arguments, *ignored], construct)
        return kind

    return decorate


class _PerEpochSchedule(LRScheduler):
    """A schedule that counts epochs, with the older name of `step`."""

    if TYPE_CHECKING:  # what `_with_arguments` makes is checked when it is called

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @checked
    def epoch(self, epoch: int | None = None) -> None:
        """Advance, as `step` does."""
        self.step(epoch)


@_with_arguments("learning_rate step_size gamma:decay_rate")
class StepDecay(_PerEpochSchedule, lr.StepDecay):
    """learning_rate times decay_rate after every step_size epochs."""


@_with_arguments("learning_rate milestones gamma:decay_rate")
class MultiStepDecay(_PerEpochSchedule, lr.MultiStepDecay):
    """learning_rate times decay_rate for every milestone that has been reached."""


@_with_arguments("learning_rate lr_lambda")
class LambdaDecay(_PerEpochSchedule, lr.LambdaDecay):
    """learning_rate * lr_lambda(epoch)."""


@_with_arguments(
    "learning_rate mode factor:decay_rate patience verbose threshold threshold_mode cooldown min_lr "
    "epsilon:eps",
    argument("dtype", str, "float32"),
)
class ReduceLROnPlateau(lr.ReduceOnPlateau):
    """lr.ReduceOnPlateau with the older arguments."""

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
