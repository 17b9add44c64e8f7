"""LookAhead (Zhang et al., 2019): slow weights that follow the inner optimizer's."""

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.initial_values import initial_rows
from psfleet.optimizer.amp import GradientScaler
from psfleet.optimizer.clip import ClipGradBase
from psfleet.optimizer.optimizer import Optimizer, Pairs
from psfleet.parameters.binding import BoundTable, BoundTables, tables
from psfleet.parameters.parameter import Parameter
from psfleet.rules.rule import Rule
from psfleet.runtime.interface import TableState
from psfleet.schema.table import DecaySpec
from psfleet.validation.annotations import PositiveInt, Range, checked

__all__ = ["LookAhead"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class LookAhead(Optimizer):
    """Every k updates: slow += alpha * (fast - slow), fast = slow.

    The slow weights start from the fast ones after the first update, as in the reference. Worker 0
    keeps them; on a cluster all workers meet at every k-th update.

    Args:
        inner_optimizer: Updates the fast weights.
        alpha: How far slow goes to fast, in [0, 1].
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

    def set_lr(self, value: float) -> None:
        """Set the inner optimizer's learning rate."""
        self.inner_optimizer.set_lr(value)

    def set_lr_scheduler(self, scheduler: Any) -> None:
        """Set the inner optimizer's schedule."""
        self.inner_optimizer.set_lr_scheduler(scheduler)

    def clip_by(self, clip: ClipGradBase) -> None:
        """As Optimizer: the inner one clips."""
        self.inner_optimizer.clip_by(clip)

    def shorten(self, shortener: GradientScaler) -> None:
        """As Optimizer: the inner one sends the gradients."""
        self.inner_optimizer.shorten(shortener)

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
        found = self.inner_optimizer.state_dict()
        for name, (ids, slow) in self._slow.items():
            found[f"{name}.slow"] = slow.copy()
            if ids is not None:
                found[f"{name}.slow_ids"] = ids
        return found

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

    A row that came after the first update was untouched then: it starts from its first value.
    """
    ids, values = slow
    if ids is None or state.ids is None:
        return values
    spec = seat.spec
    joined = initial_rows(state.ids, spec.dim, spec.initializer, spec.seed, spec.name)
    joined[np.searchsorted(state.ids, ids)] = values
    return joined
