"""Saving and loading state dicts: tensors as safetensors, all else as JSON; nothing is unpickled."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from psfleet.checkpoint.tensors import read_arrays, write_arrays
from psfleet.errors import CheckpointError, ShapeError, UsageError
from psfleet.formats.document import Format, exact, reading
from psfleet.parameters.binding import tables
from psfleet.parameters.parameter import Parameter
from psfleet.platform.atomic_files import let_appear
from psfleet.program.variable import Variable
from psfleet.runtime import interface as runtimes
from psfleet.schema.table import key_of

__all__ = ["ParameterState", "load", "load_dygraph", "save", "save_dygraph", "set_value"]

_FORMAT = Format("state dict")
Floats = NDArray[np.float32]


class ParameterState(dict[str, Any]):
    """A state dict of parameters, to tell it from an optimizer's."""


def save(state_dict: dict[str, Any], path: str) -> None:
    """Write a state dict to a file, which appears whole or not at all.

    Args:
        state_dict: Arrays and variables by name; and numbers, strings, lists and dicts of those.
        path: The file.

    Raises:
        UsageError: A value cannot be saved. CheckpointError: The file cannot be written.
    """
    arrays = {
        name: np.ascontiguousarray(value.numpy() if isinstance(value, Variable) else value)
        for name, value in state_dict.items()
        if isinstance(value, Variable | np.ndarray)
    }
    rest = {name: value for name, value in state_dict.items() if name not in arrays}
    try:
        document = _FORMAT.document(values=json.loads(json.dumps(rest, default=_plain)))
    except TypeError as error:
        raise UsageError(f"the state dict cannot be saved to {path!r}: {error}") from None
    try:
        let_appear(Path(path), lambda draft: write_arrays(draft, arrays, document))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path!r} cannot be written: {error}") from None


def load(path: str) -> dict[str, Any]:
    """A state dict from a file written by `save`.

    Raises:
        CheckpointError: The file is missing, damaged or another's.
    """
    with reading(path):
        fields, found = read_arrays(path, _FORMAT)
        [values] = exact(fields, "state dict", values=dict)
        return {**found, **values}


def save_dygraph(state_dict: dict[str, Any], model_path: str) -> None:
    """Write a layer's state dict to `<model_path>.pdparams`, an optimizer's to `.pdopt`."""
    suffix = "pdparams" if isinstance(state_dict, ParameterState) else "pdopt"
    save(state_dict, f"{model_path}.{suffix}")


def load_dygraph(model_path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts of parameters and of the optimizer; empty if there is no such file.

    Raises:
        CheckpointError: There is neither file.
    """
    base = model_path.removesuffix(".pdparams").removesuffix(".pdopt")
    parts = [Path(f"{base}.{suffix}") for suffix in ("pdparams", "pdopt")]
    if not any(part.exists() for part in parts):
        raise CheckpointError(f"neither {parts[0]} nor {parts[1]} exists")
    parameters, optimizer = (load(str(part)) if part.exists() else {} for part in parts)
    return ParameterState(parameters), optimizer


def set_value(pairs: Sequence[tuple[Parameter, NDArray[Any]]]) -> None:
    """Set parameters, in the fleet's tables where they have one.

    Raises:
        ShapeError: A value has another shape than its parameter. Nothing was changed.
    """
    for parameter, value in pairs:
        if value.shape != parameter.shape:
            raise ShapeError(
                f"parameter {parameter.name!r} has shape {parameter.shape}, "
                f"the value has {value.shape}"
            )
    bound = (
        []
        if not runtimes.is_active()
        else [(p, value) for p, value in pairs if key_of(p.name) in runtimes.active().specs()]
    )
    for parameter, value in pairs:
        parameter._value = np.array(value, np.float32)
    if bound:
        tables().exclusively(lambda: _write_all(bound))


def _write_all(pairs: Sequence[tuple[Parameter, NDArray[Any]]]) -> None:
    for parameter, value in pairs:
        _write(parameter, value)


def _write(parameter: Parameter, value: NDArray[Any]) -> None:
    """Set a table's weights and leave its state; rows that had no state start theirs."""
    spec = runtimes.active().specs()[key_of(parameter.name)]
    ids = np.arange(len(value), dtype=np.int64) if spec.kind == "sparse" else None
    tables().set_weights(spec, np.array(value, np.float32), ids)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a value is {value!r}")
