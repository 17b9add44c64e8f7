"""State dicts of DistributedOptimizer: optimizer state read from the servers' tables, and written back.

The layout is torch's, so that a plain torch optimizer can load it. An additional entry `tables` has the
state of tables that torch's layout cannot represent, such as embeddings whose ids are any int64.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psfleet.core.base.errors import UsageError
from psfleet.core.base.json_documents import Format, exact, reading
from psfleet.core.engine.gradient_checks import as_ids
from psfleet.core.engine.runtime_interface import Runtime, TableState
from psfleet.core.runtime.strategy import Settings
from psfleet.optimizer.optimizer import Optimizer as FleetOptimizer
from psfleet.torch.parameter_plan import DenseBinding, SparseBinding
from psfleet.torch.rule_mapping import StateSlots, entry_of, slots_of

HEADER = "psfleet"  # key of a state dict for the version of its layout
_FORMAT = Format("torch optimizer")
_PARTS = (HEADER, "state", "param_groups", "tables", "loss_scaling")

Entry = Mapping[str, Any]
Write = Callable[[], None]


def check_saved(settings: Settings, workers: int) -> None:
    """Refuse to save the optimizer state if each worker has its own, so that no process has the whole state.

    Raises:
        UsageError: Each worker has its own optimizer state.
    """
    if settings.consistency.declared.adds_deltas:
        mode = f"in {settings.consistency.mode} mode"
    elif settings.localsgd is not None and workers > 1:
        mode = f"under localsgd with {workers} workers"
    else:
        return
    raise UsageError(
        f"{mode} each worker has optimizer state of its own, which opt.state_dict() cannot hold; save "
        "with fleet.save_persistables, load with fleet.load_model, and the state begins again"
    )


def version() -> int:
    """Return the version of the layout. A state dict of psfleet has it under the key HEADER; torch's has no
    such key.
    """
    return _FORMAT.version


def check_version(state_dict: Mapping[str, Any]) -> None:
    """Refuse a state dict that another version of psfleet wrote in another layout. State dicts of torch pass.

    Raises:
        UsageError: The layout has another version.
    """
    if HEADER in state_dict:
        with reading("the state dict", UsageError):
            _FORMAT.fields({"format": _FORMAT.name, "version": state_dict[HEADER]})
            exact(state_dict, "parts", **{name: object for name in _PARTS if name in state_dict})


def entries(
    runtime: Runtime, dense: Sequence[DenseBinding], sparse: Sequence[SparseBinding]
) -> dict[Tensor, dict[str, Any]]:
    """Return the optimizer state of each parameter in torch's layout. State that torch's layout cannot
    represent is left out.
    """
    states: dict[Tensor, dict[str, Any]] = {}
    for binding in dense:
        if binding.spec.rule.slots:
            state = runtime.read_table(binding.spec.key)
            states[binding.parameter] = entry_of(binding.spec.rule, state.step, state.values[1:])
    for table in sparse:
        if _in_layout(table) and table.spec.rule.slots:
            step, _, slots = table.rows.saved_state()
            states[table.rows.weight] = entry_of(table.spec.rule, step, slots)
    return states


def table_entries(sparse: Sequence[SparseBinding]) -> dict[str, dict[str, Any]]:
    """Return the optimizer state of embeddings that torch's layout cannot represent, by the name of the
    table.
    """
    states = {}
    for table in sparse:
        if _in_layout(table):
            continue
        step, ids, slots = table.rows.saved_state()
        entry: dict[str, Any] = {"step": step}
        if ids is not None:
            entry["ids"] = torch.from_numpy(ids)
        for slot, values in zip(table.spec.rule.slots, slots, strict=True):
            entry[slot.name] = torch.from_numpy(values)
        if isinstance(table.owner, FleetOptimizer):
            entry["schedule"] = table.owner.state_dict()
        states[table.spec.name] = entry
    return states


def prepared(
    runtime: Runtime,
    dense: Sequence[DenseBinding],
    sparse: Sequence[SparseBinding],
    states: Mapping[Tensor, Entry],
    tables: Mapping[str, Entry],
) -> list[Write]:
    """Check a whole state dict before anything is written, and return the functions that write it into the
    tables.

    Args:
        dense, sparse: The parameters and embeddings, with their tables.
        states: Optimizer state in torch's layout. A parameter without an entry gets initial state, as in
            torch.
        tables: State of the other tables, as `table_entries` returns it.

    Raises:
        UsageError, ShapeError: The state belongs to another model or to other optimizers.
    """
    stored_rows = {table.spec.name: table for table in sparse if not _in_layout(table)}
    specs = [binding.spec for binding in dense] + [binding.spec for binding in sparse]
    if not states and not tables and any(spec.rule.slots for spec in specs):
        raise UsageError(
            "the state dict has no optimizer state: it was saved before the first step, or by a "
            "psfleet that left the state on the servers; load the fleet's with fleet.load_model, or "
            "leave the call out to begin again"
        )
    unlike = sorted(set(stored_rows) ^ set(tables))
    if unlike:
        where = "the state dict" if unlike[0] in tables else "the model"
        raise UsageError(f"only {where} has the table {unlike[0]!r}; load it into the same model")
    slots = [_slots(binding, states) for binding in dense]
    writes = [_dense_write(runtime, *pair) for pair in zip(dense, slots, strict=True)]
    for table in sparse:
        name = table.spec.name
        if name in stored_rows:
            writes.append(_table_write(table, tables[name]))
        else:
            writes.append(_rows_write(table, _slots(table, states)))
    return writes


def begun(
    runtime: Runtime,
    dense: Sequence[DenseBinding],
    sparse: Sequence[SparseBinding],
    states: Mapping[Tensor, Entry],
) -> list[Write]:
    """Return the functions that write the torch optimizers' state into the new tables after a conversion.

    `states`: State of each parameter that a torch optimizer has trained before the conversion.
    """
    writes = []
    for binding in dense:
        if binding.parameter in states:
            writes.append(_dense_write(runtime, binding, _slots(binding, states)))
    for table in sparse:
        if _in_layout(table) and table.rows.weight in states:
            writes.append(_rows_write(table, _slots(table, states)))
    return writes


def _in_layout(table: SparseBinding) -> bool:
    """Return True if torch's layout can represent the table's state."""
    return table.rows.count is not None and not isinstance(table.owner, FleetOptimizer)


def _slots(binding: DenseBinding | SparseBinding, states: Mapping[Tensor, Entry]) -> StateSlots:
    parameter = binding.parameter if isinstance(binding, DenseBinding) else binding.rows.weight
    return slots_of(
        binding.spec.name, binding.spec.rule, tuple(parameter.shape), states.get(parameter)
    )


def _dense_write(runtime: Runtime, binding: DenseBinding, slots: StateSlots) -> Write:
    def write() -> None:
        table = runtime.read_table(binding.spec.key)
        step = table.step if slots.step is None else slots.step
        runtime.write_table(binding.spec.key, TableState(step, [table.values[0], *slots.values]))

    return write


def _rows_write(table: SparseBinding, slots: StateSlots) -> Write:
    return lambda: table.rows.restore(slots.step, slots.values)


def _table_write(table: SparseBinding, entry: Entry) -> Write:
    """Check the saved state of a table that torch's layout cannot represent, and return the function that
    writes it.
    """
    rows, name = table.rows, table.spec.name
    keys = ["step", *(["ids"] if rows.count is None else [])]
    keys += [slot.name for slot in table.spec.rule.slots]
    missing = next((key for key in keys if key not in entry), None)
    if missing:
        raise UsageError(
            f"the optimizer state of {name!r} lacks {missing!r}; it was saved by another optimizer, "
            f"and the rule here is {table.spec.rule}"
        )
    ids = as_ids(entry["ids"].cpu().numpy(), name) if rows.count is None else None
    slots = [entry[slot.name].detach().cpu().numpy() for slot in table.spec.rule.slots]
    shape = (rows.count if ids is None else len(ids), rows.dim)
    for slot, values in zip(table.spec.rule.slots, slots, strict=True):
        if values.shape != shape or values.dtype != np.float32:
            raise UsageError(
                f"the optimizer state of {name!r} has {slot.name!r} of shape {values.shape} and "
                f"{values.dtype}; it must be {shape} and float32"
            )
    return lambda: rows.restore(int(entry["step"]), slots, ids)
