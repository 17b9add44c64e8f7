"""What a learning-rate schedule is: a rate that changes when its owner calls `step()`."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from psfleet.errors import ConfigError, UsageError

__all__ = ["LRScheduler", "check_number", "check_rate"]


def check_number(
    owner: str, name: str, value: Any, allowed: Callable[[Any], bool], wanted: str
) -> None:
    """Refuse what is no number, or not an allowed one; `wanted` says which ones are."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not allowed(value):
        raise ConfigError(f"{owner}: {name} is {value!r}, it must be {wanted}")


def check_rate(owner: str, value: Any, name: str = "learning_rate") -> float:
    """The rate as a float; refuse what is not a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise ConfigError(f"{owner}: {name} is {value!r}, it must be a number or an LRScheduler")
    if not (math.isfinite(value) and float(value) >= 0):
        raise ConfigError(f"{owner}: {name} is {value!r}, it must be a finite number of at least 0")
    return float(value)


class LRScheduler:
    """Base of the schedules. A subclass gives `get_lr()` as a function of `self.last_epoch`.

    An epoch is whatever one call of `step()` stands for: a batch or a pass over the data.

    Attributes:
        base_lr: The rate that the schedule starts from.
        last_epoch: Number of `step()` calls so far, unless `step(epoch)` set it.
        last_lr: The current rate; calling the scheduler returns it too.
        steps_itself: The optimizer calls `step()` after each update, as the older functions want.
    """

    _kept: tuple[str, ...] = ("last_epoch", "last_lr")
    steps_itself = False

    def __init__(
        self, learning_rate: float = 0.1, last_epoch: int = -1, verbose: bool = False
    ) -> None:
        self.base_lr = check_rate(type(self).__name__, learning_rate)
        self.last_lr = self.base_lr
        self.last_epoch = last_epoch
        self.verbose = verbose
        self.step()

    def __call__(self) -> float:
        """The current rate."""
        return self.last_lr

    def get_lr(self) -> float:
        """The rate of epoch `last_epoch`."""
        raise NotImplementedError

    def step(self, epoch: int | None = None) -> None:
        """Go to the next epoch, or to `epoch`."""
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self.last_lr = float(self.get_lr())
        if self.verbose:
            print(
                f"Epoch {self.last_epoch}: {type(self).__name__} set learning rate to "
                f"{self.last_lr}."
            )

    def state_dict(self) -> dict[str, Any]:
        """What `set_state_dict` needs to go on from here: plain numbers by name."""
        return {name: getattr(self, name) for name in self._kept}

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where `state_dict()` was called.

        Raises:
            UsageError: An entry is missing; nothing was changed.
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
            setattr(self, name, state_dict[name])

    set_dict = set_state_dict
