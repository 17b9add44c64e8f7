"""Reading of all arrays in a file of another library: NumPy, safetensors, Parquet or torch.

Imports find weights and ids with it (`imported_rows.py`). If one array cannot be read, for example because
NumPy lacks its number format, the remaining arrays are still read, and the reason is returned. A file of
unknown origin runs no code: only the types that `torch.load(weights_only=True)` allows are unpickled.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from psfleet.core.base.errors import CheckpointError
from psfleet.core.base.files import reason
from psfleet.core.engine.kernels.number_formats import decode


def arrays_of(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read all arrays of a file.

    Returns a pair: the arrays by name, and a mapping from the name of each unreadable array to the reason.

    Raises:
        CheckpointError: The file's name has an unknown ending, or torch cannot read the file.
    """
    match path.suffix.lower():
        case ".npy":
            return {"value": np.load(path, allow_pickle=False)}, {}
        case ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return _each(archive.files, archive.__getitem__)
        case ".safetensors":
            with safe_open(path, "numpy") as file:
                return _each(file.keys(), lambda name: _tensor(path, file, name))
        case ".parquet":
            from psfleet.core.base.arrow import pq

            table = pq.ParquetFile(path).read()
            return _each(table.column_names, lambda name: _column(table.column(name)))
        case ".pt" | ".pth" | ".bin":
            tensors = dict(_torch_tensors(path))
            return _each(tensors, lambda name: tensors[name].numpy())
    raise CheckpointError(
        f"{str(path)!r} has the ending {path.suffix!r}; use .npy, .npz, .safetensors, .parquet, .pt, .txt "
        "or .vec, or the folder of a snapshot"
    )


def _each(
    names: Collection[str], read: Callable[[str], NDArray[Any]]
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    arrays, unusable = {}, {}
    for name in names:
        try:
            arrays[name] = read(name)
        except Exception as error:  # for example a number format that NumPy lacks
            unusable[name] = f"cannot be read: {reason(error)}"
    return arrays, unusable


def _tensor(path: Path, file: Any, name: str) -> NDArray[Any]:
    """Read a tensor of an open safetensors file. bfloat16, which NumPy lacks, is decoded here."""
    if file.get_slice(name).get_dtype() != "BF16":
        tensor: NDArray[Any] = file.get_tensor(name)
        return tensor
    with path.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        entry = json.loads(content.read(size))[name]
    start, end = entry["data_offsets"]
    halves = np.fromfile(path, "<u2", (end - start) // 2, offset=8 + size + start)
    return decode(halves.astype(np.uint16, copy=False).reshape(entry["shape"]), "bfloat16")


def _column(column: Any) -> NDArray[Any]:
    """Convert a column of a Parquet file to an array [n], or [n, dim] if each cell is a list of `dim`
    numbers.

    Raises:
        ValueError: A list is null, contains a null, or has another length than the first list.
    """
    from psfleet.core.base.arrow import pa, pc

    if isinstance(column.type, pa.BaseExtensionType):
        column = column.cast(column.type.storage_type)
    if not pa.types.is_floating(getattr(column.type, "value_type", None) or pa.null()):
        return np.asarray(column)
    missing = np.asarray(pc.is_null(column))
    if missing.any():
        raise ValueError(f"row {np.argmax(missing)} is null")
    widths = np.asarray(pc.list_value_length(column))
    width = int(widths[0]) if len(widths) else getattr(column.type, "list_size", 0)
    if (widths != width).any():
        row = int(np.argmax(widths != width))
        raise ValueError(f"row {row} has {widths[row]} numbers, the rows before it {width}")
    numbers = pc.list_flatten(column)
    missing = np.asarray(pc.is_null(numbers))
    if missing.any():
        raise ValueError(f"row {np.argmax(missing) // width} has a null")
    return np.asarray(numbers).reshape(len(column), width)


def _torch_tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and tensor of each tensor in a file of torch. Names join the keys of nested dicts,
    such as "state_dict.X.weight".
    """
    import torch

    def within(thing: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, torch.Tensor):
            tensor = thing.detach()  # a Parameter would refuse `numpy()`
            # Convert only bfloat16 and float8, which NumPy lacks, to float32. Rounding float64 to float32
            # could turn a fraction among ids into a whole number.
            is_short = tensor.is_floating_point() and tensor.element_size() < 4
            yield name or "value", tensor.float() if is_short else tensor
        elif isinstance(thing, Mapping):
            for key, entry in thing.items():
                yield from within(entry, f"{name}.{key}" if name else str(key))

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Compared by name, because no module of psfleet may import pickle.
        if type(error).__name__ != "UnpicklingError":
            raise
        raise CheckpointError(
            f"{str(path)!r} is no file of torch, or has more than tensors in dicts; save the state_dict() of "
            "the module"
        ) from None
    yield from within(content, "")
