"""Step counters as variables of a program. Paddle scripts compute learning rates from them."""

from psfleet.core.base.validation.annotations import checked
from psfleet.core.graph.program.ops.manipulate import StepCounter
from psfleet.core.graph.program.variable import Variable, apply

__all__ = ["_decay_step_counter", "autoincreased_step_counter"]


@checked
def autoincreased_step_counter(
    counter_name: str | None = None, begin: int = 1, step: int = 1
) -> Variable:
    """Return a variable that counts the training runs of the program, int64 [1].

    Its value is begin + step * (runs - 1), where `runs` includes the present run.

    Args:
        counter_name: Name of the variable.
        begin, step: First value and increment.
    """
    count = apply(StepCounter(), name=counter_name)
    return count if (begin, step) == (1, 1) else (count + -1) * step + begin


@checked
def _decay_step_counter(begin: int = 0) -> Variable:
    """Return a variable with `begin` plus the number of training runs before the present run, int64 [1]."""
    return apply(StepCounter()) + (begin - 1)
