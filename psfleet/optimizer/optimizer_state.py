"""State dicts of optimizers: reads the state arrays from the tables, and writes them back.

Moments and step counts are stored in the tables, in a cluster on the servers. `state_dict()` reads them
under the names `parameter.slot`. `set_state_dict()` checks all entries before it writes the first table, so
that a wrong state changes nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.base.validation.annotations import NonNegativeInt, check, checked
from psfleet.core.engine.gradients import as_numbers
from psfleet.core.engine.runtime_interface import TableState
from psfleet.core.graph.parameters.binding import BoundTable, BoundTables, tables
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.parameters.parameter_client import slots_of
from psfleet.core.runtime.process_runtime import check_none_waits
from psfleet.core.runtime.stages import here
from psfleet.optimizer.lr.scheduler import LRScheduler
from psfleet.optimizer.outgoing_gradients import GradientMerger, GradientScaler, check_scaling

Floats = NDArray[np.float32]
_WHOLE = frozenset({"LR_Scheduler", "global_step", "loss_scaling", "master_weights"})


class StatefulOptimizer(ABC):
    """Base of Optimizer with its counters and with the methods that save and restore its state.

    Args:
        name: Name in error messages.
        multi_precision: True if the state includes the float32 masters of 16-bit parameters.
    """

    def __init__(self, name: str, rate: float | LRScheduler, multi_precision: bool) -> None:
        self._name = name
        self._rate = rate
        self.multi_precision = multi_precision
        self._known: dict[str, Parameter] = {}
        self._planned: list[
            Parameter
        ] = []  # parameters that runs of a program update, in all stages
        self._waiting: dict[
            str, Any
        ] = {}  # loaded state, to be written when its parameter is first updated
        self._updates = 0
        self._last_rate: float | None = None
        self.scaler: GradientScaler | None = None
        self.merger: GradientMerger[Parameter] | None = None

    @property
    @abstractmethod
    def parameters(self) -> list[Parameter]:
        """Parameters passed to the constructor or, if none were passed, all parameters updated so far."""

    @abstractmethod
    def _find(self, parameter: Parameter) -> BoundTable | None:
        """Return the parameter's table, or None if it does not exist yet."""

    @abstractmethod
    def _bind(self, parameter: Parameter, by_rows: bool = False) -> BoundTable:
        """Return the parameter's table. Create it if it does not exist yet."""

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, read from the tables. It is empty before the first update.

        The dict has these entries:

        - `name.slot` for each parameter and each state array, float32 in the parameter's shape;
        - `name.step`, the parameter's number of updates;
        - `name.ids`, int64 [n], for a parameter whose rows may have any id; its slots are [n, dim];
        - `LR_Scheduler`, the state of the schedule, if the optimizer has one;
        - `global_step`, the number of updates of the optimizer;
        - `loss_scaling`, the state of the scaler, if the strategy has amp;
        - `master_weights` with `multi_precision`: float32 weights by parameter name.

        State from `set_state_dict` for parameters that were not updated yet is included.

        Raises:
            UsageError: gradient_merge has gradients that were not pushed yet. The state would lack them.
        """
        self._check_none_waits()
        if not self._updates:
            return dict(self._waiting)
        home = tables()
        if here().processes > 1:
            for (
                parameter
            ) in self._planned:  # tables of other stages exist, but not yet in this process
                self._bind(parameter)
        home.runtime.flush()
        bound_tables = [bound for p in self._known.values() if (bound := self._find(p)) is not None]
        names = {bound.parameter.name for bound in bound_tables}
        state = {
            key: value
            for key, value in self._waiting.items()
            if "." in key and key.rpartition(".")[0] not in names
        }
        state |= gather(home, bound_tables)
        if self.multi_precision:
            state["master_weights"] = masters(home, bound_tables)
        state["global_step"] = self._updates
        if self.scaler is not None:
            state["loss_scaling"] = self.scaler.state_dict()
        if isinstance(self._rate, LRScheduler):
            state["LR_Scheduler"] = self._rate.state_dict()
        return state

    @checked
    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state made by `state_dict()`. Weights are not part of the state.

        On a cluster every worker must call this. If a parameter has no table yet, its state is written at its
        first update.

        Raises:
            UsageError: An entry is missing, or no entry belongs to this optimizer's parameters. Nothing was
                changed.
            ShapeError: An entry has a wrong shape. Nothing was changed.
        """
        self._check_state(state_dict)
        home = tables()
        bound_tables = [self._find(p) for p in self._known.values()]
        restore(
            home, self._name, [bound for bound in bound_tables if bound is not None], state_dict
        )
        if self.merger is not None:
            self.merger.drop_waiting()
        self._waiting = dict(state_dict)
        self._updates = int(state_dict.get("global_step", self._updates))
        self._last_rate = None
        if self.scaler is not None and "loss_scaling" in state_dict:
            self.scaler.set_state_dict(state_dict["loss_scaling"])
        if isinstance(self._rate, LRScheduler) and "LR_Scheduler" in state_dict:
            self._rate.set_state_dict(state_dict["LR_Scheduler"])

    def _check_none_waits(self) -> None:
        if self.merger is not None:
            check_none_waits(self.merger.waiting, "a state dict")

    def _check_state(self, state: Any) -> None:
        """Raise UsageError for the state of another optimizer or model, before any table is written."""
        if not isinstance(state, Mapping):
            raise UsageError(
                f"{self._name}: the state is {state!r}, it must be what state_dict() gave"
            )
        check(self._name, "the state's global_step", state.get("global_step", 0), NonNegativeInt)
        if isinstance(self._rate, LRScheduler) and "LR_Scheduler" in state:
            self._rate.check_state(state["LR_Scheduler"])
        if self.scaler is not None and "loss_scaling" in state:
            check_scaling(self._name, state["loss_scaling"])
        keys_by_name = {str(key).rpartition(".")[0]: key for key in state if key not in _WHOLE}
        names = {p.name for p in (*self.parameters, *self._planned)} or keys_by_name.keys() - {""}
        if keys_by_name and not names & keys_by_name.keys():
            raise UsageError(
                f"{self._name}: the state has {next(iter(keys_by_name.values()))!r} and nothing of the "
                f"optimizer's own parameters ({', '.join(sorted(names)) or 'none yet'}); is it of "
                "another model?"
            )

    @checked
    def set_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state, as `set_state_dict` does."""
        self.set_state_dict(state_dict)

    @checked
    def load(self, stat_dict: dict[str, Any]) -> None:
        """Set the state, as `set_state_dict` does."""
        self.set_state_dict(stat_dict)


def gather(home: BoundTables, bound_tables: Sequence[BoundTable]) -> dict[str, Any]:
    """Return `name.slot` and `name.step` of the given tables, and `name.ids` of tables with rows of any
    id."""
    state: dict[str, Any] = {}
    for bound in bound_tables:
        name, table = bound.parameter.name, home.runtime.read_table(bound.key)
        state[f"{name}.step"] = table.step
        if bound.spec.kind == "sparse" and not bound.is_bounded:
            state[f"{name}.ids"] = table.ids
        whole = bound.spec.kind == "sparse" and bound.is_bounded
        slots = slots_of(bound.spec, bound.all_ids(), table) if whole else table.values[1:]
        for slot, values in zip(bound.spec.rule.slots, slots, strict=True):
            state[f"{name}.{slot.name}"] = values
    return state


def masters(home: BoundTables, bound_tables: Sequence[BoundTable]) -> dict[str, Floats]:
    """Return the master weights: the float32 weights of the parameters whose dtype is float16 or bfloat16.

    Args:
        home: Object that reads the values from the tables.
        bound_tables: Parameters of the optimizer, each with its table.

    Returns:
        Weights by name of the parameter.
    """
    return {
        bound.parameter.name: np.array(home.value(bound.parameter))
        for bound in bound_tables
        if bound.parameter.dtype != "float32" and bound.is_bounded
    }


def restore(
    home: BoundTables, owner: str, bound_tables: Sequence[BoundTable], state: dict[str, Any]
) -> None:
    """Write the entries of `state` that belong to the given tables, after all entries were checked."""
    writes = [
        (bound, _state(owner, bound, state))
        for bound in bound_tables
        if any(key.startswith(f"{bound.parameter.name}.") for key in state)
    ]
    if not writes:
        return

    def write() -> None:
        for bound, table_state in writes:
            master = state.get("master_weights", {}).get(bound.parameter.name)
            table_state.values.insert(
                0,
                _weights(home, bound, table_state)
                if master is None
                else np.array(master, np.float32),
            )
            home.runtime.write_table(bound.key, table_state)

    home.exclusively(write)


def _state(owner: str, bound: BoundTable, entries: dict[str, Any]) -> TableState:
    """Return the table's state from the entries, without its weights."""
    name, ids = bound.parameter.name, None
    if bound.spec.kind == "sparse":
        ids = bound.all_ids() if bound.is_bounded else _entry(owner, entries, f"{name}.ids")
    shape = bound.spec.shape if ids is None else (len(ids), bound.spec.dim)
    slots = [
        as_numbers(
            _entry(owner, entries, f"{name}.{slot.name}"), f"{owner}: the state {name}.{slot.name}"
        ).astype(np.float32, copy=False)
        for slot in bound.spec.rule.slots
    ]
    for slot, values in zip(bound.spec.rule.slots, slots, strict=True):
        if values.shape != shape:
            raise ShapeError(
                f"{owner}: the state {name}.{slot.name} has shape {values.shape}, "
                f"it must be {shape}"
            )
    step = check(owner, f"{name}.step", _entry(owner, entries, f"{name}.step"), NonNegativeInt)
    return TableState(step, slots, ids)


def _entry(owner: str, state: dict[str, Any], key: str) -> Any:
    if key not in state:
        raise UsageError(
            f"{owner}: the state has no entry {key!r}; was it made by another optimizer?"
        )
    return state[key]


def _weights(home: BoundTables, bound: BoundTable, state: TableState) -> Floats:
    if bound.spec.kind == "dense":
        return np.array(home.value(bound.parameter))
    assert state.ids is not None
    return np.array(home.lookup(bound.parameter, state.ids))
