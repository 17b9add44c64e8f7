"""Lines of CSV, TSV and libsvm files as Arrow parses them, which is far faster than one by one."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from psfleet.datasets.mapped_samples import LARGEST
from psfleet.platform.arrow import pa, pc, pcsv

__all__ = ["parsed"]

_READ_OTHERWISE = (b'"', b"0x", b"0X", b"\xef\xbb\xbf")  # by csv, int and the codec of Python
# Comments, values of several numbers, and what Python takes for spaces or ends of lines.
_NO_PAIRS = (b"#", b"|", b"\v", b"\f", b"\x1c", b"\x1d", b"\x1e", b"\x1f")


def parsed(
    data: bytes,
    names: Sequence[str],
    delimiter: str,
    converters: Mapping[str, Callable[[str], Any]],
    lists: Collection[str],
) -> Any:
    """A pyarrow.Table of some columns, or None where a line may be wrong or mean something else to Python.

    Args:
        data: The lines.
        names: Of all cells of a line.
        delimiter: Between cells; "": the lines are those of libsvm.
        converters: By column int, float or str: what its values are. Empty cells are null.
        lists: Columns that always have lists; others have them where a cell has a `|`.
    """
    if len(set(names)) < len(names) or any(mark in data for mark in _READ_OTHERWISE):
        return None
    try:
        texts = _cells(data, names, delimiter, list(converters)) if delimiter else _pairs(data)
        if texts is None:
            return None
        columns = {
            name: _converted(texts.column(name), make, name in lists)
            for name, make in converters.items()
        }
    except pa.ArrowException:
        return None
    finite = all(_is_finite(columns[name]) for name, make in converters.items() if make is float)
    return pa.table(columns) if finite else None


def _cells(data: bytes, names: Sequence[str], delimiter: str, wanted: Sequence[str]) -> Any:
    """The texts in these columns."""
    return pcsv.read_csv(
        pa.BufferReader(data),
        pcsv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
        pcsv.ParseOptions(delimiter=delimiter, quote_char=False),
        pcsv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            include_columns=wanted,
            strings_can_be_null=True,
            null_values=[""],
        ),
    )


def _pairs(data: bytes) -> Any:
    """The texts in lines of libsvm: label, and lists of indices and values. None as for `parsed`."""
    if not data.isascii() or any(mark in data for mark in _NO_PAIRS):
        return None
    lines = pa.array(data.decode().splitlines(), pa.string())
    words = pc.ascii_split_whitespace(pc.ascii_trim_whitespace(lines))
    counts = pc.list_value_length(words).to_numpy()
    starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    flat, is_pair = pc.list_flatten(words), np.ones(starts[-1], np.bool_)
    is_pair[starts[:-1]] = False
    pairs = pc.split_pattern(flat.filter(pa.array(is_pair)), ":")
    if not (pc.list_value_length(pairs).to_numpy() == 2).all():
        return None
    if not pc.binary_length(pc.list_flatten(pairs)).to_numpy().all():  # to Python `:3` has no index
        return None
    offsets = pa.array(starts - np.arange(len(starts), dtype=np.int32))
    index, value = (
        pa.ListArray.from_arrays(offsets, pc.list_element(pairs, side)) for side in (0, 1)
    )
    labels = pc.replace_substring_regex(flat.take(pa.array(starts[:-1])), r"^\+(\d)", r"\1")
    return pa.table({"label": labels, "index": index, "value": value})


def _converted(texts: Any, make: Callable[[str], Any], is_list: bool) -> Any:
    kind = {int: pa.int64(), float: pa.float64()}.get(make, pa.string())  # type: ignore[call-overload]
    if pa.types.is_list(texts.type):
        return texts.cast(pa.list_(kind))
    if is_list or pc.any(pc.match_substring(texts, "|")).as_py():
        return pc.split_pattern(texts, "|").cast(pa.list_(kind))
    return texts.cast(kind)


def _is_finite(column: Any) -> bool:
    """Whether all numbers are finite as float32."""
    flat = pc.list_flatten(column) if pa.types.is_list(column.type) else column
    values = flat.drop_null().to_numpy()
    return bool((np.abs(values) <= LARGEST).all())
