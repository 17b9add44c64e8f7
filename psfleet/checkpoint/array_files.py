"""Arrays by name in the files of other libraries: NumPy, safetensors, Parquet and torch.

An array that cannot be read, such as one in a number format that NumPy does not have, costs no other array
of its file: it is listed with the reason.
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
    """The arrays of a file by name, and for each that cannot be read the reason."""
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
        except Exception as error:  # as of a number format that NumPy does not have
            unusable[name] = f"cannot be read: {reason(error)}"
    return arrays, unusable


def _tensor(path: Path, file: Any, name: str) -> NDArray[Any]:
    """A tensor of an open safetensors file. NumPy has no bfloat16, so these bytes are read here."""
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
    """A column, [n], or of lists of equally many numbers [n, dim].

    Raises:
        ValueError: A list of numbers is missing, or longer or shorter than the first, or lacks a number.
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
    """Yield the tensors of a file of torch as NumPy can have them, those in dicts as "dict.name"."""
    import torch

    def within(thing: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, torch.Tensor):
            tensor = thing.detach()  # of a Parameter too
            # bfloat16 and float8 are not of NumPy; float64 has to stay, for ids that are none.
            is_short = tensor.is_floating_point() and tensor.element_size() < 4
            yield name or "value", tensor.float() if is_short else tensor
        elif isinstance(thing, Mapping):
            for key, entry in thing.items():
                yield from within(entry, f"{name}.{key}" if name else str(key))

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # The class is asked for by name, since nothing that is shipped may import the module that has it.
        if type(error).__name__ != "UnpicklingError":
            raise
        raise CheckpointError(
            f"{str(path)!r} is no file of torch, or has more than tensors in dicts; save the state_dict() of "
            "the module"
        ) from None
    yield from within(content, "")
