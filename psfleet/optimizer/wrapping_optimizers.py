"""Optimizers around another one: recompute and LookAhead; and which optimizers stand alone."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ConfigError, UsageError
from psfleet.kernels.initial_values import initial_rows
from psfleet.optimizer.clip import ClipGradBase
from psfleet.optimizer.dgc import DGCMomentum
from psfleet.optimizer.optimizer import Optimizer, Pairs
from psfleet.optimizer.outgoing_gradients import GradientScaler
from psfleet.parameters.binding import BoundTable, BoundTables, tables
from psfleet.parameters.parameter import Parameter
from psfleet.rules.rule import Rule
from psfleet.runtime.interface import TableState
from psfleet.schema.table import DecaySpec
from psfleet.strategy import RecomputeSettings
from psfleet.validation.annotations import NonNegative, PositiveInt, Range, checked

COMMON = frozenset({"__class__", "_inner", "minimize"})


class WrappingOptimizer(Optimizer):
    """Its methods and attributes are those of the wrapped optimizer, but for the names in `own`."""

    own: ClassVar[frozenset[str]] = COMMON

    def __init__(self, optimizer: Optimizer, **values: Any) -> None:
        for name, value in {"_inner": optimizer, **values}.items():
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        if name in type(self).own:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_inner"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)


class RecomputeOptimizer(WrappingOptimizer):
    """An optimizer whose backward pass drops what lies between checkpoints and computes it again.

    Everything but `backward`, `minimize` and `load` is the wrapped optimizer's own.

    Args:
        optimizer: Updates the parameters.
    """

    own = COMMON | {"_checkpoints", "_set_checkpoints", "backward", "load"}

    @checked
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, _checkpoints=None)

    def _set_checkpoints(self, checkpoints: Any) -> None:
        """Say what to keep.

        Args:
            checkpoints: Variables, parameters, or names of variables or layers; or
                psfleet.program.backward.Automatic(budget): the first run chooses. Data and parameters
                are kept anyway: among the checkpoints they change nothing.
        """
        object.__setattr__(self, "_checkpoints", checkpoints)

    @checked
    def load(self, stat_dict: dict[str, Any]) -> None:
        """Refuse, as the reference does.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "RecomputeOptimizer.load is not supported; call load or set_state_dict of the "
            f"{type(self._inner).__name__} that it wraps"
        )

    @checked
    def backward(
        self,
        loss: Any,
        startup_program: Any = None,
        parameter_list: Iterable[Any] | None = None,
        no_grad_set: Iterable[Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[tuple[Any, Any]]:
        """Run the wrapped optimizer's backward, with recomputing.

        Raises:
            UsageError: No checkpoints were set, or the loss has a value already.
        """
        from psfleet.program.backward import append_backward

        if self._checkpoints is None:
            raise UsageError("RecomputeOptimizer has no checkpoints; call _set_checkpoints first")
        if getattr(loss, "value", None) is not None:
            raise UsageError("the loss has a value already; recompute works in programs")
        targets = self._inner._parameters if parameter_list is None else parameter_list
        return list(append_backward(loss, targets, no_grad_set, callbacks, self._checkpoints))


def recomputing(optimizer: Optimizer, settings: RecomputeSettings) -> RecomputeOptimizer:
    """The optimizer with recomputing as a strategy asks for it."""
    from psfleet.program.backward import Automatic

    wrapper = RecomputeOptimizer(optimizer)
    wrapper._set_checkpoints(list(settings.checkpoints) or Automatic(settings.budget))
    return wrapper


Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class LookAhead(Optimizer):
    """Every k updates: slow += alpha * (fast - slow), fast = slow.

    The slow weights start from the fast ones after the first update, as in the reference. Worker 0
    keeps them; on a cluster all workers meet at every k-th update.

    Args:
        inner_optimizer: Updates the fast weights.
        alpha: Fraction of the way that slow goes to fast, in [0, 1].
        k: Updates between two looks, at least 1.
    """

    @checked
    def __init__(
        self,
        inner_optimizer: Optimizer,
        alpha: Annotated[float, Range(0, 1)] = 0.5,
        k: PositiveInt = 5,
        name: str | None = None,
    ) -> None:
        super().__init__(0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.alpha = np.float32(alpha)
        self.k = k
        self._parameters = inner_optimizer._parameters
        self._slow: dict[str, tuple[Ids | None, Floats]] = {}

    def rule(self, parameter: Parameter | None = None) -> Rule:
        """The inner optimizer's."""
        return self.inner_optimizer.rule(parameter)

    def decay(self, parameter: Parameter | None = None) -> DecaySpec:
        """The inner optimizer's."""
        return self.inner_optimizer.decay(parameter)

    def get_lr(self) -> float:
        """The inner optimizer's."""
        return self.inner_optimizer.get_lr()

    def current_step_lr(self) -> float:
        """The inner optimizer's."""
        return self.inner_optimizer.current_step_lr()

    def get_opti_var_name_list(self) -> list[str]:
        """The inner optimizer's, and `name.slow`."""
        slow = [f"{name}.slow" for name in self._slow]
        return self.inner_optimizer.get_opti_var_name_list() + slow

    @checked
    def set_lr(self, value: NonNegative) -> None:
        """Set the inner optimizer's learning rate."""
        self.inner_optimizer.set_lr(value)

    @checked
    def set_lr_scheduler(self, scheduler: Any) -> None:
        """Set the inner optimizer's schedule."""
        self.inner_optimizer.set_lr_scheduler(scheduler)

    def clip_by(self, clip: ClipGradBase) -> None:
        """Set the clip as Optimizer does: the inner one clips."""
        self.inner_optimizer.clip_by(clip)

    def scale(self, scaler: GradientScaler) -> None:
        """Set the scaler as Optimizer does: the inner one sends the gradients."""
        self.inner_optimizer.scale(scaler)

    def _seat(self, parameter: Parameter, by_rows: bool = False) -> BoundTable:
        return self.inner_optimizer._seat(parameter, by_rows)

    def _update(self, pairs: Pairs, samples: int, loss: float | None) -> None:
        inner = self.inner_optimizer
        inner.apply_values(pairs, samples, loss)
        home = tables()
        seats = [inner._seat(p) for p, _ in pairs if p.trainable]
        self._known.update({seat.parameter.name: seat.parameter for seat in seats})
        self._updates += 1
        if home.runtime.worker_index == 0:
            for seat in seats:
                if seat.parameter.name not in self._slow:
                    self._slow[seat.parameter.name] = _weights(home, seat)
        if self._updates % self.k == 0:
            home.exclusively(lambda: self._look(home, seats))

    def _look(self, home: BoundTables, seats: list[BoundTable]) -> None:
        for seat in seats:
            state = home.runtime.read_table(seat.key)
            slow = _joined(self._slow[seat.parameter.name], state, seat)
            slow += self.alpha * (state.values[0] - slow)
            self._slow[seat.parameter.name] = (state.ids, slow)
            home.runtime.write_table(
                seat.key, TableState(state.step, [slow, *state.values[1:]], state.ids)
            )

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and on worker 0 `name.slow` in the form of a state slot."""
        state = self.inner_optimizer.state_dict()
        for name, (ids, slow) in self._slow.items():
            state[f"{name}.slow"] = slow.copy()
            if ids is not None:
                state[f"{name}.slow_ids"] = ids
        return state

    @checked
    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state made by `state_dict()`."""
        self.inner_optimizer.set_state_dict(state_dict)
        self._updates = self.inner_optimizer._updates
        self._slow = {
            key.removesuffix(".slow"): (state_dict.get(f"{key}_ids"), np.array(values, np.float32))
            for key, values in state_dict.items()
            if key.endswith(".slow")
        }


def _weights(home: BoundTables, seat: BoundTable) -> tuple[Ids | None, Floats]:
    home.runtime.flush()
    state = home.runtime.read_table(seat.key)
    return state.ids, state.values[0]


def _joined(slow: tuple[Ids | None, Floats], state: TableState, seat: BoundTable) -> Floats:
    """The slow weights of the table's rows.

    A row that came after the first update was untouched then: it starts from its first value. One that has
    gone since, by eviction or a shrink, is left out.
    """
    ids, values = slow
    if ids is None or state.ids is None:
        return values
    spec = seat.spec
    whole = initial_rows(state.ids, spec.dim, spec.initializer, spec.seed, spec.name)
    stay = np.isin(ids, state.ids)
    whole[np.searchsorted(state.ids, ids[stay])] = values[stay]
    return whole


def check_outside(owner: str, optimizer: Any) -> None:
    """Refuse an optimizer whose rule alone does not do all that it promises."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"the optimizer of {owner} is {optimizer!r}; it must be one of psfleet.optimizer"
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, DGCMomentum | LookAhead):
        raise ConfigError(
            f"the optimizer of {owner} is {kind}, which works on the worker; pushes go straight to "
            "the servers: take any other"
        )
    if optimizer.common()["grad_clip"] is not None:
        raise ConfigError(
            f"the {kind} of {owner} has a grad_clip, which would not be applied; clip what you push"
        )
