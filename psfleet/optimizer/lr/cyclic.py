"""Schedules in which the rate rises: warm-up and cycles."""

import math
from collections.abc import Callable
from typing import Annotated, Literal

from psfleet.errors import ConfigError
from psfleet.optimizer.lr.scheduler import Epoch, LRScheduler
from psfleet.validation.annotations import (
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Range,
    checked,
)

__all__ = ["CyclicLR", "LinearLR", "LinearWarmup", "OneCycleLR"]


class LinearWarmup(LRScheduler):
    """From start_lr to end_lr in warmup_steps epochs, then `learning_rate` or that schedule."""

    @checked
    def __init__(
        self,
        learning_rate: NonNegative | LRScheduler,
        warmup_steps: NonNegativeInt,
        start_lr: NonNegative,
        end_lr: NonNegative,
        last_epoch: Epoch = -1,
        verbose: bool = False,
    ) -> None:
        if end_lr <= start_lr:
            raise ConfigError(
                f"LinearWarmup: end_lr is {end_lr!r}, it must be above start_lr {start_lr!r}"
            )
        self.start_lr = float(start_lr)
        self.after = learning_rate
        self.warmup_steps = warmup_steps
        self.end_lr = end_lr
        super().__init__(start_lr, last_epoch, verbose)

    def get_lr(self) -> float:
        if self.last_epoch < self.warmup_steps:
            part = self.last_epoch / self.warmup_steps
            return (self.end_lr - self.start_lr) * part + self.start_lr
        if isinstance(self.after, LRScheduler):
            self.after.step(self.last_epoch - self.warmup_steps)
            return self.after.last_lr
        return self.after

    def state_dict(self) -> dict[str, object]:
        """As the base; a schedule that follows is under `LinearWarmup_LR`."""
        state = super().state_dict()
        if isinstance(self.after, LRScheduler):
            state["LinearWarmup_LR"] = self.after.state_dict()
        return state

    def set_state_dict(self, state_dict: dict[str, object]) -> None:
        """As the base, and for the schedule that follows."""
        super().set_state_dict(state_dict)
        inner = state_dict.get("LinearWarmup_LR")
        if isinstance(self.after, LRScheduler) and isinstance(inner, dict):
            self.after.set_state_dict(inner)


class LinearLR(LRScheduler):
    """learning_rate times a factor from start_factor to end_factor in total_steps epochs."""

    @checked
    def __init__(
        self,
        learning_rate: NonNegative,
        total_steps: PositiveInt,
        start_factor: Annotated[float, Range(0, 1, low_open=True)] = 1.0 / 3,
        end_factor: Annotated[float, Range(0, 1)] = 1.0,
        last_epoch: Epoch = -1,
        verbose: bool = False,
    ) -> None:
        self.total_steps = total_steps
        self.start_factor = start_factor
        self.end_factor = end_factor
        super().__init__(learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        part = min(self.last_epoch, self.total_steps) / self.total_steps
        return self.base_lr * (self.start_factor + (self.end_factor - self.start_factor) * part)


class OneCycleLR(LRScheduler):
    """Up to max_learning_rate and down to end_learning_rate within total_steps epochs.

    It starts from max_learning_rate / divide_factor and rises for phase_pct of the epochs. With
    `three_phase` it comes down to the start in as many epochs and goes to the end in the rest.
    """

    @checked
    def __init__(
        self,
        max_learning_rate: NonNegative,
        total_steps: PositiveInt,
        divide_factor: Positive = 25.0,
        end_learning_rate: NonNegative = 0.0001,
        phase_pct: Annotated[float, Range(0, 1)] = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        three_phase: bool = False,
        last_epoch: Epoch = -1,
        verbose: bool = False,
    ) -> None:
        if three_phase and phase_pct > 0.5:
            raise ConfigError(
                f"OneCycleLR: phase_pct is {phase_pct!r}, it must be at most 0.5 with three phases"
            )
        top, end = float(max_learning_rate), float(end_learning_rate)
        start = top / divide_factor
        turn = phase_pct * total_steps
        if three_phase:
            self.turns = [0, turn - 1, 2 * turn - 2, total_steps - 1]
            self.rates = [start, top, start, end]
        else:
            self.turns = [0, turn - 1, total_steps - 1]
            self.rates = [start, top, end]
        self.total_steps = total_steps
        self.way = _WAYS[anneal_strategy]
        super().__init__(start, last_epoch, verbose)

    def get_lr(self) -> float:
        if self.last_epoch > self.total_steps:
            raise ConfigError(
                f"OneCycleLR: epoch is {self.last_epoch}, "
                f"but the cycle has total_steps {self.total_steps}"
            )
        for i in range(1, len(self.turns)):
            if self.last_epoch <= self.turns[i] or i == len(self.turns) - 1:
                length = self.turns[i] - self.turns[i - 1]
                part = (self.last_epoch - self.turns[i - 1]) / length if length else 1.0
                return self.way(self.rates[i - 1], self.rates[i], part)
        raise AssertionError("unreachable: the last phase takes every epoch")


def _cosine(start: float, end: float, part: float) -> float:
    return end + (start - end) / 2.0 * (1 + math.cos(math.pi * part))


def _linear(start: float, end: float, part: float) -> float:
    return (end - start) * part + start


_WAYS: dict[str, Callable[[float, float, float], float]] = {"cos": _cosine, "linear": _linear}


class CyclicLR(LRScheduler):
    """From base_learning_rate up to max_learning_rate and down again, over and over.

    The height of a cycle stays (`triangular`), is halved from cycle to cycle (`triangular2`) or
    shrinks by exp_gamma every epoch (`exp_range`); or `scale_fn` says it, as a function of the
    cycle (scale_mode 'cycle') or of the epoch ('iterations').
    """

    @checked
    def __init__(
        self,
        base_learning_rate: NonNegative,
        max_learning_rate: NonNegative,
        step_size_up: PositiveInt,
        step_size_down: PositiveInt | None = None,
        mode: str = "triangular",
        exp_gamma: NonNegative = 1.0,
        scale_fn: Callable[[float], float] | None = None,
        scale_mode: Literal["cycle", "iterations"] = "cycle",
        last_epoch: Epoch = -1,
        verbose: bool = False,
    ) -> None:
        down = step_size_up if step_size_down is None else step_size_down
        if scale_fn is None and mode not in ("triangular", "triangular2", "exp_range"):
            raise ConfigError(
                f"CyclicLR: mode is {mode!r}, use triangular, triangular2 or exp_range"
            )
        self.cycle_size = step_size_up + down
        self.up = step_size_up / self.cycle_size
        self.max_lr = float(max_learning_rate)
        self.mode = mode
        self.exp_gamma = exp_gamma
        self.scale_fn = scale_fn
        self.scale_mode = scale_mode
        super().__init__(base_learning_rate, last_epoch, verbose)

    def get_lr(self) -> float:
        cycle = 1 + self.last_epoch // self.cycle_size
        place = 1.0 + self.last_epoch / self.cycle_size - cycle
        height = place / self.up if place <= self.up else (1 - place) / (1 - self.up)
        return self.base_lr + (self.max_lr - self.base_lr) * height * self._scale(cycle)

    def _scale(self, cycle: int) -> float:
        if self.scale_fn is not None:
            place = cycle if self.scale_mode == "cycle" else self.last_epoch
            return self._answer("scale_fn", self.scale_fn(place))
        if self.mode == "triangular2":
            return 1 / 2.0 ** (cycle - 1)
        return float(self.exp_gamma**self.last_epoch) if self.mode == "exp_range" else 1.0
