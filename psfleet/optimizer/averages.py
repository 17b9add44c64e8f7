"""Averages of the weights over training, to evaluate with: ExponentialMovingAverage and ModelAverage.

Averaged weights often score better than the last ones. Each worker averages the dense weights that it sees,
in its own memory; the servers' tables do not change. `apply()` shows the averages in place of the weights
while a block runs:

    with ema.apply():
        evaluate(model)
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
"""Updates after which ModelAverage moves its first sum into the second. A float32 sum of more terms would
lose the low bits of each further one; Paddle uses the same number."""
_COUNTS = ("num_updates", "num_accumulates", "old_num_accumulates")


class WeightAverage:
    """Base of both averages: chooses the parameters, and shows averages in their place.

    The averages belong to this worker and are made from the values that it sees. The tables do not change,
    so other workers go on training while this one evaluates. Rows of distributed parameters are not
    averaged.
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
        """Accumulate after each run of the program being built, if that program trains.

        Args:
            trains: True if the program will train, though it has no update yet.

        Returns:
            False in eager mode and for programs that do not train: the caller accumulates then.
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
        """Go on from a state made by `state_dict()`."""
        raise NotImplementedError

    @checked
    def set_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state, as `set_state_dict` does."""
        self.set_state_dict(state_dict)

    def _entries(self, state: Any, endings: Sequence[str]) -> dict[str, list[Floats]]:
        """Return the arrays `name.ending` of a state, a list for each name with one array for each ending.

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
        """Show the averages in place of the weights inside the block.

        Args:
            executor: Accepted for Paddle scripts.
            need_restore: False leaves the averages in place after the block, until `restore()`.
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
        """Show the weights again."""
        for parameter, before in self._shown:
            parameter.binding = before
        self._shown.clear()


class ExponentialMovingAverage(WeightAverage):
    """Exponential moving average of the weights: ema = d * ema + (1 - d) * w after each update.

    `apply()` shows ema / (1 - d^updates), which corrects for the start at zero.

    Args:
        decay: d, in [0, 1).
        thres_steps: Number of steps s, as a number, a function or a variable. Early averages then forget
            faster: d is min(decay, (1 + s) / (10 + s)).
        parameters: Parameters to average. None averages those that the program, or any optimizer, updates.
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
        """Add the current weights to the average: now, or after each run of the program being built."""
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
        """Return `name.ema` of each parameter, the number of updates and the decay of the last one."""
        return {
            **{f"{name}.ema": ema.copy() for name, ema in self._ema.items()},
            "updates": self._updates,
            "decay": self._now,
        }

    @checked
    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state made by `state_dict()`."""
        ema = {name: values[0] for name, values in self._entries(state_dict, ["ema"]).items()}
        updates = self._number(state_dict, "updates", NonNegativeInt)
        self._now = self._number(state_dict, "decay", NonNegative)
        self._updates, self._ema = updates, ema


class ModelAverage(WeightAverage):
    """Mean of the weights over a window of the last updates.

    A window is full when it has at least min_average_window weights and at least min(max_average_window,
    updates * average_window_rate). It then becomes the old window and a new one begins. `apply()` shows the
    mean over both. If the average is made while a training program is built, it takes the weights after
    each run; otherwise call `step()` after each update.

    Args:
        parameters: Parameters as in ExponentialMovingAverage.
        regularization: Accepted for Paddle scripts: nothing is trained here.
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
        """Add the current weights to the window."""
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
        """Add the weights to the window, now or after each run of the program being built; nothing is
        trained.

        Arguments as in Optimizer.minimize; a clip changes no weight, so it has no effect.

        Returns:
            ([], params_grads): the parameters that the loss depends on.
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
        """The loss's (parameter, gradient) pairs, as Optimizer.backward."""
        return program_access.differentiate(
            loss, parameter_list, no_grad_set, self._given, callbacks
        )

    @checked
    def apply_gradients(self, params_grads: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Add the weights to the window; the gradients have no effect.

        Args:
            params_grads: (parameter, gradient) pairs. If the gradients are program variables, the weights
                are added after each run of the program.

        Returns:
            An empty list: there are no operations.
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
        """Apply gradients, as `apply_gradients` does."""
        return self.apply_gradients(params_grads)

    @checked
    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Set the gradients of the averaged parameters to zero, or drop them."""
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
        """`name.sum_1` to `name.sum_3` of each parameter and the three counts."""
        state: dict[str, Any] = {
            f"{name}.sum_{i}": part.copy()
            for name, sums in self._sums.items()
            for i, part in enumerate(sums, 1)
        }
        return state | {name: getattr(self, name) for name in _COUNTS}

    @checked
    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state made by `state_dict()`."""
        sums = self._entries(state_dict, ["sum_1", "sum_2", "sum_3"])
        counts = {name: self._number(state_dict, name, NonNegativeInt) for name in _COUNTS}
        for name, count in counts.items():
            setattr(self, name, count)
        self._sums = sums


def _accumulate(sums: list[Floats], value: Floats, spill: bool, full: bool) -> None:
    """sum_1: the newest weights; sum_2: those before the last spill; sum_3: the old window's."""
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
