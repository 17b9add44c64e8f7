"""Base class of learning-rate schedules (LRScheduler), and ReduceOnPlateau.

A schedule stores the present rate in `last_lr`. An optimizer reads it at each update, and `step()` computes
the next rate. A subclass declares its arguments as fields, like a dataclass, and computes the rate in
`get_lr`:

    @schedule
    class Halving(LRScheduler):
        learning_rate: NonNegative
        last_epoch: Epoch = -1
        verbose: bool = False
        def get_lr(self): return self.base_lr / 2**self.last_epoch

The decorator `schedule` makes a constructor with these fields as arguments, which checks their values.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from typing_extensions import dataclass_transform

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.validation.annotations import (
    Must,
    NonNegative,
    NonNegativeInt,
    Range,
    check,
    checked,
)

S = TypeVar("S", bound="LRScheduler")
Epoch = Annotated[int, Range(-1)]
"""Epoch of the last `step()`, or -1 before the first."""


Mode = Annotated[str, Must(lambda v: v.lower() in ("min", "max"), "min or max")]
Measure = Annotated[str, Must(lambda v: v.lower() in ("rel", "abs"), "rel or abs")]


class LRScheduler:
    """Base of schedules. A subclass defines `get_lr()` as a function of `self.last_epoch`.

    Here an *epoch* is the time between two calls of `step()`. It may be a batch or a pass over the data. A
    new schedule is in epoch 0, because the constructor calls `step()` too.

    Args:
        learning_rate: Rate that the schedule starts from.
        last_epoch: Last epoch of an earlier run to continue, or -1 to start.
        verbose: True to print the rate at each step.

    Attributes:
        base_lr: Rate that the schedule starts from.
        last_epoch: Present epoch: the number of `step()` calls after the constructor, unless `step(epoch)`
            set it.
        last_lr: Present rate. Calling the schedule returns the same number.
        steps_itself: True if the optimizer calls `step()` after each update.
    """

    _kept: ClassVar[tuple[str, ...]] = ("last_epoch", "last_lr")
    steps_itself = False

    @checked
    def __init__(
        self, learning_rate: NonNegative = 0.1, last_epoch: Epoch = -1, verbose: bool = False
    ) -> None:
        self.base_lr = float(learning_rate)
        self.last_lr = self.base_lr
        self.last_epoch = last_epoch
        self.verbose = verbose
        self.step()

    def __call__(self) -> float:
        """Return the present rate."""
        return self.last_lr

    def get_lr(self) -> float:
        """Return the rate for epoch `last_epoch`. A subclass must define it."""
        raise NotImplementedError

    def _first_rate(self) -> float:
        """Check that the fields are consistent, and return the rate that the schedule starts from."""
        rate: float = vars(self)["learning_rate"]
        return rate

    @checked
    def step(self, epoch: int | None = None) -> None:
        """Go to the next epoch, or to `epoch`, and compute its rate.

        Raises:
            ConfigError: The schedule has no rate for this epoch.
        """
        self._go_to(epoch)
        self.last_lr = self._computed()
        if self.verbose:
            print(
                f"Epoch {self.last_epoch}: {type(self).__name__} set learning rate to "
                f"{self.last_lr}."
            )

    def _go_to(self, epoch: Any) -> None:
        if epoch is None:
            self.last_epoch += 1
        else:
            self.last_epoch = check(type(self).__name__, "epoch", epoch, NonNegative)

    def _reply(self, name: str, value: Any) -> float:
        """Check that the result of a user's function is a number, and return it."""
        return float(check(type(self).__name__, f"what {name} gives", value, float))

    def _computed(self) -> float:
        owner, rate = type(self).__name__, f"the rate of epoch {self.last_epoch}"
        try:
            value = self.get_lr()
        except ArithmeticError as error:
            raise ConfigError(f"{owner}: {rate} cannot be computed: {error}") from None
        return float(check(owner, rate, value, float))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, numbers by name, for `set_state_dict`."""
        return {name: getattr(self, name) for name in self._kept}

    @checked
    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state made by `state_dict()`.

        Raises:
            UsageError: An entry is missing or is no number. Nothing was changed.
        """
        self.check_state(state_dict)
        for name in self._kept:
            setattr(self, name, state_dict[name])

    def check_state(self, state_dict: Any) -> None:
        """Check that `set_state_dict` can use a state.

        Raises:
            UsageError: An entry is missing or is no number.
        """
        if not isinstance(state_dict, Mapping):
            raise UsageError(
                f"{type(self).__name__}: the state is {state_dict!r}, it must be what state_dict() gave"
            )
        missing = [name for name in self._kept if name not in state_dict]
        if missing:
            raise UsageError(
                f"{type(self).__name__}: the state has no {missing[0]!r}; "
                f"it must have {', '.join(self._kept)}"
            )
        for name in self._kept:
            check(type(self).__name__, f"the state's {name}", state_dict[name], float | None)

    @checked
    def set_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state, as `set_state_dict` does."""
        self.set_state_dict(state_dict)


@dataclass_transform()
def schedule(kind: type[S]) -> type[S]:
    """Class decorator that gives a schedule a constructor with the class's fields as arguments.

    The constructor checks each argument against the field's annotation and stores it as an attribute.
    """
    fields = inspect.get_annotations(kind)

    def construct(self: S, values: dict[str, Any]) -> None:
        vars(self).update(values)
        LRScheduler.__init__(self, self._first_rate(), self.last_epoch, self.verbose)

    defaults = vars(kind)
    arguments = [
        argument(name, fields[name], defaults.get(name, Parameter.empty)) for name in fields
    ]
    set_constructor(kind, arguments, construct)
    return kind


def argument(name: str, annotation: Any, default: Any = Parameter.empty) -> Parameter:
    """Return an argument for a signature, which can be passed by position or by name."""
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def set_constructor(
    kind: type[S], arguments: Sequence[Parameter], construct: Callable[[S, dict[str, Any]], None]
) -> None:
    """Give a class a constructor that checks its arguments and then calls a function with them.

    Args:
        arguments: Arguments of the constructor after `self`. Their annotations are checked.
        construct: Function to call with the new object and the values of the arguments by name.
    """
    signature = inspect.Signature([argument("self", Parameter.empty), *arguments])

    def __init__(self: S, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        del bound.arguments["self"]
        construct(self, bound.arguments)

    __init__.__signature__ = signature.replace(return_annotation=None)  # type: ignore[attr-defined]
    __init__.__annotations__ = {parameter.name: parameter.annotation for parameter in arguments} | {
        "return": None
    }
    __init__.__module__, __init__.__qualname__ = kind.__module__, f"{kind.__qualname__}.__init__"
    kind.__init__ = checked(__init__)  # type: ignore[method-assign, assignment]


@checked
class ReduceOnPlateau(LRScheduler):
    """Schedule that reduces the rate when a metric has not improved for more than `patience` steps.

        rate = ReduceOnPlateau(0.1, patience=3)
        rate.step(validation_loss)  # after each epoch

    Args:
        learning_rate: Rate to start from.
        mode: `min` if smaller metrics are better, `max` if larger ones are.
        factor: Factor on the rate at each reduction.
        patience: Number of steps in a row without improvement that do not yet reduce the rate.
        threshold, threshold_mode: Smallest change of the metric that is an improvement: relative to the best
            metric (`rel`) or absolute (`abs`).
        cooldown: Number of steps after a reduction in which the metric is not judged.
        min_lr: Lowest rate.
        epsilon: A reduction of the rate by less than this is not made.
        verbose: True to print each reduction.
    """

    _kept = ("last_epoch", "last_lr", "best", "num_bad_epochs", "cooldown_counter")

    @checked
    def __init__(
        self,
        learning_rate: NonNegative,
        mode: Mode = "min",
        factor: Annotated[float, Range(0, 1, high_open=True)] = 0.1,
        patience: NonNegativeInt = 10,
        threshold: NonNegative = 1e-4,
        threshold_mode: Measure = "rel",
        cooldown: NonNegativeInt = 0,
        min_lr: NonNegative = 0,
        epsilon: NonNegative = 1e-8,
        verbose: bool = False,
    ) -> None:
        self.mode = mode.lower()
        self.factor = factor
        self.patience = patience
        self.threshold = threshold
        self.threshold_mode = threshold_mode.lower()
        self.cooldown = cooldown
        self.min_lr = float(min_lr)
        self.epsilon = epsilon
        self.verbose = verbose
        self.base_lr = self.last_lr = float(learning_rate)
        self.last_epoch = 0
        self.best: float | None = None
        self.num_bad_epochs = 0
        self.cooldown_counter = 0

    def get_lr(self) -> float:
        """Return the present rate, which only `step` changes."""
        return self.last_lr

    @checked
    def step(self, metrics: Any = None, epoch: int | None = None) -> None:  # type: ignore[override]  # needs a metric
        """Go to the next epoch, or to `epoch`, and reduce the rate if the metric does not improve.

        Args:
            metrics: Value of the metric: a number, or an array or variable with one value.
            epoch: Epoch to go to, or None for the next one.
        """
        metric = np.asarray(metrics.numpy() if hasattr(metrics, "numpy") else metrics)
        if metric.size != 1 or metric.dtype.kind not in "iuf":
            raise ConfigError(f"ReduceOnPlateau: metrics is {metrics!r}, it must be one number")
        self._go_to(epoch)
        self._judge(float(metric.reshape(())))

    def _judge(self, metric: float) -> None:
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            return
        if self.best is None or self._better(metric, self.best):
            self.best, self.num_bad_epochs = metric, 0
        else:
            self.num_bad_epochs += 1
        if self.num_bad_epochs > self.patience:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
            self._reduce()

    def _better(self, metric: float, best: float) -> bool:
        # As in Paddle, the relative margin is the best value times the threshold. If the best value is
        # negative, so is the margin, and a slightly worse metric counts as an improvement.
        margin = best * self.threshold if self.threshold_mode == "rel" else self.threshold
        return metric < best - margin if self.mode == "min" else metric > best + margin

    def _reduce(self) -> None:
        rate = max(self.last_lr * self.factor, self.min_lr)
        if self.last_lr - rate > self.epsilon:
            self.last_lr = rate
            if self.verbose:
                print(f"Epoch {self.last_epoch}: ReduceOnPlateau set learning rate to {rate}.")
