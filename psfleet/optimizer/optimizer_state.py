"""An optimizer's state as arrays by name: gathered from the tables and written back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ShapeError, UsageError
from psfleet.parameters.binding import BoundTable, BoundTables
from psfleet.parameters.parameter import as_numbers
from psfleet.parameters.parameter_client import slots_of
from psfleet.runtime.interface import TableState
from psfleet.validation.annotations import NonNegativeInt, check

__all__ = ["gather", "masters", "restore"]

Floats = NDArray[np.float32]


def gather(home: BoundTables, seats: Sequence[BoundTable]) -> dict[str, Any]:
    """`name.slot` and `name.step` (and `name.ids`, see Optimizer.state_dict) of every seat."""
    found: dict[str, Any] = {}
    for seat in seats:
        name, held = seat.parameter.name, home.runtime.read_table(seat.key)
        found[f"{name}.step"] = held.step
        if seat.spec.kind == "sparse" and not seat.bounded:
            found[f"{name}.ids"] = held.ids
        whole = seat.spec.kind == "sparse" and seat.bounded
        slots = slots_of(seat.spec, seat.all_ids(), held) if whole else held.values[1:]
        for slot, values in zip(seat.spec.rule.slots, slots, strict=True):
            found[f"{name}.{slot.name}"] = values
    return found


def masters(home: BoundTables, seats: Sequence[BoundTable]) -> dict[str, Floats]:
    """The float32 weights of the parameters that show less precision."""
    return {
        seat.parameter.name: np.array(home.value(seat.parameter))
        for seat in seats
        if seat.parameter.dtype != "float32" and seat.bounded
    }


def restore(
    home: BoundTables, owner: str, seats: Sequence[BoundTable], found: dict[str, Any]
) -> None:
    """Write the entries of `found` that belong to the seats; everything is checked first."""
    states = [
        (seat, _state(owner, seat, found))
        for seat in seats
        if any(key.startswith(f"{seat.parameter.name}.") for key in found)
    ]
    if not states:
        return

    def write() -> None:
        for seat, state in states:
            master = found.get("master_weights", {}).get(seat.parameter.name)
            state.values.insert(
                0, _weights(home, seat, state) if master is None else np.array(master, np.float32)
            )
            home.runtime.write_table(seat.key, state)

    home.exclusively(write)


def _state(owner: str, seat: BoundTable, found: dict[str, Any]) -> TableState:
    """The table's state but for its weights."""
    name, ids = seat.parameter.name, None
    if seat.spec.kind == "sparse":
        ids = seat.all_ids() if seat.bounded else _entry(owner, found, f"{name}.ids")
    shape = seat.spec.shape if ids is None else (len(ids), seat.spec.dim)
    slots = [
        as_numbers(
            _entry(owner, found, f"{name}.{slot.name}"), f"{owner}: the state {name}.{slot.name}"
        ).astype(np.float32, copy=False)
        for slot in seat.spec.rule.slots
    ]
    for slot, values in zip(seat.spec.rule.slots, slots, strict=True):
        if values.shape != shape:
            raise ShapeError(
                f"{owner}: the state {name}.{slot.name} has shape {values.shape}, "
                f"it must be {shape}"
            )
    step = check(owner, f"{name}.step", _entry(owner, found, f"{name}.step"), NonNegativeInt)
    return TableState(step, slots, ids)


def _entry(owner: str, found: dict[str, Any], key: str) -> Any:
    if key not in found:
        raise UsageError(
            f"{owner}: the state has no entry {key!r}; was it made by another optimizer?"
        )
    return found[key]


def _weights(home: BoundTables, seat: BoundTable, state: TableState) -> Floats:
    if seat.spec.kind == "dense":
        return np.array(home.value(seat.parameter))
    assert state.ids is not None
    return np.array(home.lookup(seat.parameter, state.ids))
