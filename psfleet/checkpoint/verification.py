"""Whether the files of a snapshot hold what its manifest says; checked before anything is loaded.

Checksums tell damage. This is for files whose checksums are right and whose content is not: written by
something else, or by somebody who means harm. Sizes are compared before memory is taken.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from psfleet.checkpoint.manifest import Manifest, ShardFile
from psfleet.checkpoint.tensors import NAMES, SERVER
from psfleet.formats.document import Misfit, reading
from psfleet.schema.table import TableSpec
from psfleet.tables.row_data import TableClock
from psfleet.tables.snapshot_columns import EVICTED, ColumnGroup, column_groups

__all__ = ["check_content"]

_MOST = 2**62

Sizes = dict[str, int]


def check_content(folder: Path, manifest: Manifest, opened: Sequence[tuple[Any, Any]]) -> None:
    """Compare the tensors and the clocks of every file with the manifest.

    Args:
        opened: Of each file of the manifest its tensors and its tables' clocks.

    Raises:
        CheckpointError: Something is missing or unknown, or of another size, kind or range.
    """
    covered: Sizes = {}
    for entry, (tensors, clocks) in zip(manifest.files, opened, strict=True):
        with reading(folder / entry.file):
            _check_file(manifest.tables, entry, tensors, clocks, covered)
    with reading(folder):
        if not manifest.files:
            raise ValueError("no files")
        for spec in manifest.tables:
            everywhere = all(spec.name in entry.steps for entry in manifest.files)
            held = covered.get(spec.name, 0)  # a table that is only on some was being created
            if spec.kind == "dense" and (held or everywhere) and held != spec.size:
                raise ValueError(
                    f"table {spec.name!r} has {spec.size} values, the files hold {held}"
                )


def _check_file(
    specs: Sequence[TableSpec],
    entry: ShardFile,
    tensors: Any,
    clocks: Mapping[str, TableClock],
    covered: Sizes,
) -> None:
    there = [spec for spec in specs if spec.name in entry.steps]
    if clocks.keys() != entry.steps.keys() or len(there) != len(clocks):
        raise ValueError(f"the clocks of {sorted(clocks)} for tables {sorted(entry.steps)}")
    known: set[str] = set()
    for spec in there:
        covered[spec.name] = covered.get(spec.name, 0) + _check_table(spec, entry, tensors)
        columns = (name for group in column_groups(spec) for name in group.entries)
        known |= {f"{spec.name}/{column}" for column in columns}
    for name in tensors.keys():  # noqa: SIM118  # not a dict
        if name not in known and name != SERVER:
            raise Misfit(
                f"has the unknown tensor {name!r:.600}; read it with the psfleet version that wrote it"
            )


def _check_table(spec: TableSpec, entry: ShardFile, tensors: Any) -> int:
    """Returns how many values of a dense table the file holds."""
    held = 0
    if spec.kind == "dense":
        low, high = entry.ranges[spec.name]
        if not 0 <= low <= high <= spec.size:
            raise ValueError(f"table {spec.name!r}: range {low} to {high} of {spec.size} values")
        held = high - low
    for group in column_groups(spec):
        _check_group(spec, group, tensors, held if spec.kind == "dense" else group.length)
    if spec.streams_evictions:
        _check_position(spec, tensors)
    return held


def _check_group(spec: TableSpec, group: ColumnGroup, tensors: Any, length: int | None) -> None:
    names = [f"{spec.name}/{name}" for name in group.entries]
    there = [name for name in names if name in tensors.keys()]  # noqa: SIM118  # not a dict
    if not there and group.need == "if there are any":
        return
    if there and there != names:
        raise ValueError(f"{there} without the others of {names}")
    if length is None:
        length = tensors.get_slice(names[0]).get_shape()[0]
    for name, (dtype, shape) in zip(names, group.sized(length).values(), strict=True):
        _expect(tensors, name, shape, NAMES[np.dtype(dtype).name])


def _check_position(spec: TableSpec, tensors: Any) -> None:
    ids, *_, position = (f"{spec.name}/{name}" for name in EVICTED)
    (count,) = tensors.get_slice(ids).get_shape()
    if not count <= int(tensors.get_tensor(position)[0]) <= _MOST:
        raise ValueError(f"table {spec.name!r} has {count} evictions before an impossible position")


def _expect(tensors: Any, name: str, shape: Sequence[int], dtype: str) -> None:
    found = tensors.get_slice(name)
    if list(found.get_shape()) != list(shape) or found.get_dtype() != dtype:
        raise ValueError(
            f"tensor {name!r} is {found.get_dtype()} {found.get_shape()}, not {dtype} {list(shape)}"
        )
