"""Averages of the weights over training, for evaluation: ExponentialMovingAverage and ModelAverage.

A model with averaged weights often scores better than with the last weights. Each worker averages the dense
weights that it has pulled, in its own memory; the servers' tables do not change.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.validation.annotations import (
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Range,
    check,
    checked,
)
from psfleet.core.engine.gradients import as_numbers, zeroed
from psfleet.core.graph.parameters.binding import tables
from psfleet.core.graph.parameters.parameter import Parameter, fetch
from psfleet.core.graph.parameters.table_kind import AveragedBinding
from psfleet.optimizer import program_access
from psfleet.optimizer.clip import ClipGradBase
from psfleet.regularizer import WeightDecay

Floats = NDArray[np.float32]


_SPILL = 16384
"""Number of updates after which ModelAverage moves its first sum into the second.

A float32 sum of more terms would lose the low bits of each further term. Paddle uses the same number.
"""
_COUNTS = ("num_updates", "num_accumulates", "old_num_accumulates")


class WeightAverage:
    """Base of both averages: chooses the parameters, and replaces their values by averages for an evaluation.

    A worker averages the values that it has pulled, in its own memory. The servers' tables do not change,
    so other workers can train while this worker evaluates with the averages. Parameters with
    `is_distributed` are not averaged.
    """

    def __init__(self, parameters: Iterable[Any] | None, name: str | None) -> None:
        self._given = program_access.parameters_of(type(self).__name__, parameters)
        self._name = name or type(self).__name__
        self._shown: list[tuple[Parameter, Any]] = []
        self._program: Any = None

    def _parameters(self) -> list[Parameter]:
        if self._given is not None:
            return self._given
        if self._program is not None:
            parameters = {
                p.name: p for update in self._program.updates for p, _ in update.params_grads
            }
        else:
            parameters = {p.name: p for p in tables().parameters()}
        return [
            p
            for p in parameters.values()
            if p.trainable and p.do_model_average and not p.distributed
        ]

    def _values(self) -> list[tuple[Parameter, Floats]]:
        if self._shown:
            raise UsageError(
                f"{self._name}: the averages are applied; restore() before training on"
            )
        parameters = self._parameters()
        if not parameters:
            raise UsageError(
                f"{self._name}: no parameter has been updated yet; pass parameters=[...]"
            )
        fetch([p for p in parameters if not p.sparse], [])
        return [(p, np.asarray(p.numpy(), np.float32)) for p in parameters]

    def _follow(self, accumulate: Callable[[], None], trains: bool = False) -> bool:
        """Arrange that `accumulate` is called after each step of the program being built, if it trains.

        Args:
            accumulate: Function that adds the current weights to the average.
            trains: True if the caller knows that the program will train. Otherwise it trains only if an
                optimizer has added its update already.

        Returns:
            True if `accumulate` will be called. If False, the caller must call it.
        """
        program = program_access.training_program(trains)
        if program is None:
            return False
        if program is not self._program:
            self._program = program
            program.after_step.append(lambda step: accumulate())
        return True

    def _averages(self) -> list[tuple[Parameter, Floats]]:
        raise NotImplementedError

    @checked
    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state made by `state_dict()`."""
        raise NotImplementedError

    @checked
    def set_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state, as `set_state_dict` does."""
        self.set_state_dict(state_dict)

    def _entries(self, state: Any, endings: Sequence[str]) -> dict[str, list[Floats]]:
        """Return the arrays `name.ending` of a state.

        Args:
            state: State dict.

        Returns:
            For each parameter name a list with one array for each ending.

        Raises:
            UsageError: The state is no mapping, or lacks an array.
        """
        if not isinstance(state, Mapping):
            raise UsageError(
                f"{self._name}: the state is {state!r}, it must be what state_dict() gave"
            )
        names = [
            key.removesuffix(f".{endings[0]}") for key in state if key.endswith(f".{endings[0]}")
        ]
        keys = {name: [f"{name}.{ending}" for ending in endings] for name in names}
        missing = [key for state_keys in keys.values() for key in state_keys if key not in state]
        strange = [key for key in state if "." in key and key.rpartition(".")[2] not in endings]
        if missing or (strange and not names):
            raise UsageError(
                f"{self._name}: the state has {'no ' if missing else ''}{(missing or strange)[0]!r}; "
                "was it made by another kind of average?"
            )
        return {
            name: [
                as_numbers(state[key], f"{self._name}: the state {key}").astype(np.float32)
                for key in state_keys
            ]
            for name, state_keys in keys.items()
        }

    def _number(self, state: dict[str, Any], key: str, annotation: Any) -> Any:
        return check(self._name, f"the state's {key}", state.get(key), annotation)

    @checked
    @contextlib.contextmanager
    def apply(self, executor: Any = None, need_restore: bool = True) -> Iterator[None]:
        """Context in which the parameters have the averages as their values.

            with ema.apply():
                evaluate(model)

        Args:
            executor: Accepted for Paddle scripts.
            need_restore: False to keep the averages after the block, until `restore()` is called.
        """
        averages = self._averages()
        for parameter, average in averages:
            self._shown.append((parameter, parameter.binding))
            parameter.binding = AveragedBinding(average)
        try:
            yield
        finally:
            if need_restore:
                self.restore()

    @checked
    def restore(self, executor: Any = None) -> None:
        """Give the parameters their trained weights back, after `apply(need_restore=False)`."""
        for parameter, before in self._shown:
            parameter.binding = before
        self._shown.clear()


class ExponentialMovingAverage(WeightAverage):
    """Exponential moving average of the weights w: after each update ema = d * ema + (1 - d) * w.

        ema = ExponentialMovingAverage(0.999)
        ema.update()  # after each step, or once while a program is built
        with ema.apply():
            evaluate(model)

    `apply()` uses ema / (1 - d^updates), which corrects for the start at zero.

    Args:
        decay: d, in [0, 1).
        thres_steps: Number of steps s so far, as a number, a function or a variable. If given, d is
            min(decay, (1 + s) / (10 + s)), so that the average depends less on the first weights.
        parameters: Parameters to average. None averages all parameters that are updated: by the program being
            built or, in eager mode, by any optimizer.
    """

    @checked
    def __init__(
        self,
        decay: Annotated[float, Range(0, 1, high_open=True)] = 0.999,
        thres_steps: program_access.AnyVariable | NonNegative | Callable[[], float] | None = None,
        name: str | None = None,
        parameters: Iterable[Any] | None = None,
    ) -> None:
        super().__init__(parameters, name)
        self._decay = self._now = float(decay)
        self._steps = None if thres_steps is None else program_access.reader(thres_steps)
        self._updates = 0
        self._ema: dict[str, Floats] = {}

    def update(self) -> None:
        """Add the current weights to the average.

        In eager mode this happens now. While a training program is built, it will happen after each run of
        the program.
        """
        if not self._follow(self._take):
            self._take()

    def _take(self) -> None:
        self._updates += 1
        self._now = self._decay
        if self._steps is not None:
            step_count = self._updates if self._program is None else self._program.step
            steps = self._steps(step_count - 1)
            self._now = min(self._decay, (1 + steps) / (10 + steps))
        keep, take = np.float32(self._now), np.float32(1 - self._now)
        for parameter, value in self._values():
            before = self._ema.get(parameter.name)
            self._ema[parameter.name] = (
                take * value if before is None else keep * before + take * value
            )

    def _averages(self) -> list[tuple[Parameter, Floats]]:
        if not self._updates:
            raise UsageError(f"{self._name}: apply() before the first update()")
        whole = np.float32(1 - self._now**self._updates)
        return [(p, self._ema[p.name] / whole) for p in self._parameters() if p.name in self._ema]

    def state_dict(self) -> dict[str, Any]:
        """Return `name.ema` of each parameter, the number of updates and the decay of the last update."""
        return {
            **{f"{name}.ema": ema.copy() for name, ema in self._ema.items()},
            "updates": self._updates,
            "decay": self._now,
        }

    @checked
    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state made by `state_dict()`."""
        ema = {name: values[0] for name, values in self._entries(state_dict, ["ema"]).items()}
        updates = self._number(state_dict, "updates", NonNegativeInt)
        self._now = self._number(state_dict, "decay", NonNegative)
        self._updates, self._ema = updates, ema


class ModelAverage(WeightAverage):
    """Mean of the weights after the last updates.

        average = ModelAverage(0.15, parameters=model.parameters())
        average.step()  # after each update in eager mode
        with average.apply():
            evaluate(model)

    Weights are summed over a window of updates. The window is full when it has at least `min_average_window`
    updates and at least min(max_average_window, average_window_rate * all updates so far). Then a new window
    begins. `apply()` uses the mean over the new window and the last full one.

    If the average is created while a training program is built, weights are added after each run
    automatically. Otherwise call `step()` after each update.

    Args:
        average_window_rate: Length of a window as a share of all updates so far.
        min_average_window, max_average_window: Limits of the length of a window.
        regularization: Accepted for Paddle scripts. Has no effect, because nothing is trained here.
        name: Name in error messages, or None for the name of the class.
        parameters: Parameters to average, as in ExponentialMovingAverage.
    """

    @checked
    def __init__(
        self,
        average_window_rate: NonNegative,
        min_average_window: PositiveInt = 10000,
        max_average_window: PositiveInt = 10000,
        regularization: WeightDecay | NonNegative | None = None,
        name: str | None = None,
        parameters: Iterable[Any] | None = None,
    ) -> None:
        if min_average_window > max_average_window:
            raise ConfigError(
                f"ModelAverage: min_average_window is {min_average_window!r}, it must be at most "
                f"max_average_window {max_average_window!r}"
            )
        super().__init__(parameters, name)
        self._rate = average_window_rate
        self._least, self._most = min_average_window, max_average_window
        self._sums: dict[str, list[Floats]] = {}
        self.num_updates = self.num_accumulates = self.old_num_accumulates = 0
        self._follow(self.step)

    @checked
    def step(self) -> None:
        """Add the current weights to the window. Call it after each update in eager mode."""
        self.num_updates += 1
        self.num_accumulates += 1
        full = self.num_accumulates >= self._least and (
            self.num_accumulates >= min(self._most, int(self.num_updates * self._rate))
        )
        for parameter, value in self._values():
            sums = self._sums.setdefault(parameter.name, [np.zeros_like(value) for _ in range(3)])
            _accumulate(sums, value, self.num_updates % _SPILL == 0, full)
        if full:
            self.old_num_accumulates, self.num_accumulates = self.num_accumulates, 0

    update = step

    @checked
    def minimize(
        self,
        loss: Any,
        startup_program: Any = None,
        parameters: Iterable[Any] | None = None,
        no_grad_set: Iterable[Any] | None = None,
        grad_clip: ClipGradBase | None = None,
        *,
        parameter_list: Iterable[Any] | None = None,
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Add the current weights to the window: now, or after each run of the program being built.

        Nothing is trained, so `grad_clip` has no effect. The other arguments are those of Optimizer.minimize.

        Returns:
            ([], params_grads) with the parameters that the loss depends on.
        """
        targets = parameters if parameter_list is None else parameter_list
        pairs = self.backward(loss, startup_program, targets, no_grad_set)
        return self.apply_gradients(pairs), pairs

    @checked
    def backward(
        self,
        loss: Any,
        startup_program: Any = None,
        parameter_list: Iterable[Any] | None = None,
        no_grad_set: Iterable[Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[tuple[Any, Any]]:
        """Differentiate the loss and return (parameter, gradient) pairs, as Optimizer.backward does."""
        return program_access.differentiate(
            loss, parameter_list, no_grad_set, self._given, callbacks
        )

    @checked
    def apply_gradients(self, params_grads: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Add the current weights to the window. The values of the gradients have no effect.

        Args:
            params_grads: (parameter, gradient) pairs. If the gradients are program variables, weights are
                added after each run of the program instead of now.

        Returns:
            An empty list, because no operation is added to a program.
        """
        if program_access.symbolic(program_access.pairs(self._name, params_grads)):
            self._follow(self.step, trains=True)
        else:
            self.step()
        return []

    @checked
    def apply_optimize(
        self, loss: Any, startup_program: Any, params_grads: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """Add the current weights to the window, as `apply_gradients` does."""
        return self.apply_gradients(params_grads)

    @checked
    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Set the gradients of the averaged parameters to zero, or to None if `set_to_zero` is False."""
        for parameter in self._parameters():
            parameter.grad = zeroed(parameter.grad) if set_to_zero else None

    clear_gradients = clear_grad

    def _averages(self) -> list[tuple[Parameter, Floats]]:
        count = self.num_accumulates + self.old_num_accumulates
        if not count:
            raise UsageError(f"{self._name}: apply() before the first step()")
        return [
            (p, _total(self._sums[p.name]) / np.float32(count))
            for p in self._parameters()
            if p.name in self._sums
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the sums `name.sum_1` to `name.sum_3` of each parameter, and the counts of updates."""
        state: dict[str, Any] = {
            f"{name}.sum_{i}": part.copy()
            for name, sums in self._sums.items()
            for i, part in enumerate(sums, 1)
        }
        return state | {name: getattr(self, name) for name in _COUNTS}

    @checked
    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state made by `state_dict()`."""
        sums = self._entries(state_dict, ["sum_1", "sum_2", "sum_3"])
        counts = {name: self._number(state_dict, name, NonNegativeInt) for name in _COUNTS}
        for name, count in counts.items():
            setattr(self, name, count)
        self._sums = sums


def _accumulate(sums: list[Floats], value: Floats, spill: bool, full: bool) -> None:
    """Add weights to the sums of a parameter.

    Args:
        sums: Three sums: of the newest weights, of older weights in the same window, and of the last full
            window.
        spill: True to move the first sum into the second.
        full: True to move both into the third, because the window is full.
    """
    sums[0] += value
    if spill:
        sums[1] += sums[0]
        sums[0][...] = 0
    if full:
        sums[2][...] = sums[0] + sums[1]
        sums[0][...] = 0
        sums[1][...] = 0


def _total(sums: Sequence[Floats]) -> Floats:
    total: Floats = sums[0] + sums[1] + sums[2]
    return total
