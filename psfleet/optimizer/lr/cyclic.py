"""Schedules in which the rate rises: warm-up and cycles."""

import math
from collections.abc import Callable

from psfleet.errors import ConfigError
from psfleet.optimizer.lr.base import LRScheduler, check_number, check_rate

__all__ = ["CyclicLR", "LinearLR", "LinearWarmup", "OneCycleLR"]


class LinearWarmup(LRScheduler):
    """From start_lr to end_lr in warmup_steps epochs, then `learning_rate` or that schedule."""

    def __init__(
        self,
        learning_rate: float | LRScheduler,
        warmup_steps: int,
        start_lr: float,
        end_lr: float,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        check_number("LinearWarmup", "warmup_steps", warmup_steps, lambda v: v >= 0, "at least 0")
        self.start_lr = check_rate("LinearWarmup", start_lr, "start_lr")
        check_number(
            "LinearWarmup", "end_lr", end_lr, lambda v: v > start_lr, f"above start_lr {start_lr!r}"
        )
        if not isinstance(learning_rate, LRScheduler):
            check_rate("LinearWarmup", learning_rate)
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
            return self.after()
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

    set_dict = set_state_dict


class LinearLR(LRScheduler):
    """learning_rate times a factor from start_factor to end_factor in total_steps epochs."""

    def __init__(
        self,
        learning_rate: float,
        total_steps: int,
        start_factor: float = 1.0 / 3,
        end_factor: float = 1.0,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        check_number("LinearLR", "start_factor", start_factor, lambda v: 0 < v <= 1, "in (0, 1]")
        check_number("LinearLR", "end_factor", end_factor, lambda v: 0 <= v <= 1, "in [0, 1]")
        check_number("LinearLR", "total_steps", total_steps, lambda v: v > 0, "above 0")
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

    def __init__(
        self,
        max_learning_rate: float,
        total_steps: int,
        divide_factor: float = 25.0,
        end_learning_rate: float = 0.0001,
        phase_pct: float = 0.3,
        anneal_strategy: str = "cos",
        three_phase: bool = False,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not (isinstance(total_steps, int) and total_steps > 0):
            raise ConfigError(
                f"OneCycleLR: total_steps is {total_steps!r}, it must be a whole number above 0"
            )
        if not 0 <= phase_pct <= (0.5 if three_phase else 1):
            raise ConfigError(
                f"OneCycleLR: phase_pct is {phase_pct!r}, it must be in [0, 1], "
                "and at most 0.5 with three phases"
            )
        check_number("OneCycleLR", "divide_factor", divide_factor, lambda v: v > 0, "above 0")
        if anneal_strategy not in _WAYS:
            raise ConfigError(
                f"OneCycleLR: anneal_strategy is {anneal_strategy!r}, use 'cos' or 'linear'"
            )
        top = check_rate("OneCycleLR", max_learning_rate, "max_learning_rate")
        end = check_rate("OneCycleLR", end_learning_rate, "end_learning_rate")
        start = top / float(divide_factor)
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
                part = (self.last_epoch - self.turns[i - 1]) / (self.turns[i] - self.turns[i - 1])
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

    def __init__(
        self,
        base_learning_rate: float,
        max_learning_rate: float,
        step_size_up: int,
        step_size_down: int | None = None,
        mode: str = "triangular",
        exp_gamma: float = 1.0,
        scale_fn: Callable[[float], float] | None = None,
        scale_mode: str = "cycle",
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        down = step_size_up if step_size_down is None else step_size_down
        for name, value in (("step_size_up", step_size_up), ("step_size_down", down)):
            check_number("CyclicLR", name, value, lambda v: v > 0, "above 0")
        if scale_fn is None and mode not in ("triangular", "triangular2", "exp_range"):
            raise ConfigError(
                f"CyclicLR: mode is {mode!r}, use triangular, triangular2 or exp_range"
            )
        if scale_mode not in ("cycle", "iterations"):
            raise ConfigError(f"CyclicLR: scale_mode is {scale_mode!r}, use cycle or iterations")
        self.cycle_size = step_size_up + down
        self.up = step_size_up / self.cycle_size
        self.max_lr = check_rate("CyclicLR", max_learning_rate, "max_learning_rate")
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
            return self.scale_fn(cycle if self.scale_mode == "cycle" else self.last_epoch)
        if self.mode == "triangular2":
            return 1 / 2.0 ** (cycle - 1)
        return float(self.exp_gamma**self.last_epoch) if self.mode == "exp_range" else 1.0
