"""The step counter that schedules of the older face read."""

from psfleet.core.base.validation.annotations import checked
from psfleet.core.graph.program.ops.manipulate import StepCounter
from psfleet.core.graph.program.variable import Variable, apply

__all__ = ["_decay_step_counter", "autoincreased_step_counter"]


@checked
def autoincreased_step_counter(
    counter_name: str | None = None, begin: int = 1, step: int = 1
) -> Variable:
    """The number of training runs of the program, this one included: int64 [1].

    Args:
        counter_name: Name of the result.
        begin, step: Other than 1: the number is begin + step * (runs - 1).
    """
    count = apply(StepCounter(), name=counter_name)
    return count if (begin, step) == (1, 1) else (count + -1) * step + begin


@checked
def _decay_step_counter(begin: int = 0) -> Variable:
    """The number of training runs before this one plus `begin`: int64 [1]."""
    return apply(StepCounter()) + (begin - 1)
