"""What a learning-rate schedule is: a rate that changes when its owner calls `step()`."""

from collections.abc import Mapping
from typing import Annotated, Any

from psfleet.errors import ConfigError, UsageError
from psfleet.validation.annotations import NonNegative, Range, check, checked

__all__ = ["Epoch", "LRScheduler"]

Epoch = Annotated[int, Range(-1)]
"""That of the last `step()`, before the first one -1."""


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
        """The current rate."""
        return self.last_lr

    def get_lr(self) -> float:
        """The rate of epoch `last_epoch`."""
        raise NotImplementedError

    def step(self, epoch: int | None = None) -> None:
        """Go to the next epoch, or to `epoch`.

        Raises:
            ConfigError: The schedule has no rate for it.
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

    def _answer(self, name: str, value: Any) -> float:
        """What a script's function has given, as a number."""
        return float(check(type(self).__name__, f"what {name} gives", value, float))

    def _computed(self) -> float:
        owner, rate = type(self).__name__, f"the rate of epoch {self.last_epoch}"
        try:
            found = self.get_lr()
        except ArithmeticError as error:
            raise ConfigError(f"{owner}: {rate} cannot be computed: {error}") from None
        return float(check(owner, rate, found, float))

    def state_dict(self) -> dict[str, Any]:
        """What `set_state_dict` needs to go on from here: plain numbers by name."""
        return {name: getattr(self, name) for name in self._kept}

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where `state_dict()` was called.

        Raises:
            UsageError: An entry is missing, or no number; nothing was changed.
        """
        self.check_state(state_dict)
        for name in self._kept:
            setattr(self, name, state_dict[name])

    def check_state(self, state_dict: Any) -> None:
        """Refuse what `set_state_dict` cannot take.

        Raises:
            UsageError: As there.
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

    def set_dict(self, state_dict: dict[str, Any]) -> None:
        """As `set_state_dict`."""
        self.set_state_dict(state_dict)
