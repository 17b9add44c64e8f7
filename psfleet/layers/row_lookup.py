"""The layer that looks rows of a table up."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from psfleet.entry import Entry, ShowClickEntry, part_of
from psfleet.errors import IdError, ShapeError, UsageError
from psfleet.program import names
from psfleet.program.attribute import attribute, make_parameter
from psfleet.program.operation import dtype_of, extents
from psfleet.program.ops.embedding import DenseEmbedding, Embedding
from psfleet.program.program import default_main_program
from psfleet.program.variable import Variable, apply, leaf
from psfleet.validation.annotations import checked

__all__ = ["embedding"]


@checked
def embedding(
    input: Variable,
    size: Sequence[int | None],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: DTypeLike = "float32",
    name: str | None = None,
    entry: Entry | None = None,
) -> Variable:
    """Rows of a table by id: [*input.shape, dim].

    Args:
        input: int64 ids of any shape.
        size: [rows, dim]; rows may be None with `is_distributed`.
        is_sparse: The gradient holds the batch's rows only, and they alone are updated.
        is_distributed: Ids are any int64; rows appear when first updated. Implies is_sparse.
        padding_idx: This id gives zeros and its row is never updated.
        param_attr: Attributes of the weights `name.w_0`. They start uniform in [-0.01, 0.01), the
            same whether sparse or not.
        entry: With `is_distributed`: which unknown ids of a push get a row, see psfleet.entry. The two
            inputs that a ShowClickEntry names must be there already: layers.data of any dtype, of the
            shape of `input` or with one value for each sample. Runs that do not train need no value of
            them. Computed at once (eager), each id counts one show and no click.
    """
    if dtype_of(dtype) != np.float32:
        raise ShapeError(f"embedding weights are float32; dtype is {dtype!r}")
    label = name or names.generate("embedding")
    rows, dim = _table_size(size, is_distributed, label)
    sparse = is_sparse or is_distributed
    attr = attribute(param_attr)
    if attr is None:
        raise ShapeError(f"embedding {label!r}: param_attr is False, but weights there must be")
    if padding_idx is not None and rows > 0 and not -rows <= padding_idx < rows:
        raise IdError(
            f"embedding {label!r}: padding_idx is {padding_idx}, it must be in [{-rows}, {rows})"
        )
    parameter = make_parameter(
        (rows, dim),
        f"{label}.w_0",
        attr,
        None,
        sparse=sparse,
        distributed=is_distributed,
        by_row=not sparse,
        entry=entry,
    )
    padding = padding_idx
    if padding is not None and padding < 0 and rows > 0:
        padding += rows
    op = Embedding(padding) if sparse else DenseEmbedding(padding)
    return apply(op, input, leaf(parameter), *_scores(input, entry, label), name=label)


def _scores(ids: Variable, entry: Entry | None, label: str) -> list[Variable]:
    """The inputs of the program that a ShowClickEntry names."""
    counting = part_of(entry, ShowClickEntry)
    if counting is None or ids.value is not None:
        return []
    variables = default_main_program().variables
    scores = [variables.get(name) for name in (counting.show_name, counting.click_name)]
    for name, variable in zip((counting.show_name, counting.click_name), scores, strict=True):
        if variable is None or not variable.is_data:
            raise UsageError(
                f"embedding {label!r}: its ShowClickEntry names the input {name!r}, which the program "
                f"does not have; call layers.data({name!r}, [None, 1]) before"
            )
    return [variable for variable in scores if variable is not None]


def _table_size(size: Sequence[int | None], distributed: bool, label: str) -> tuple[int, int]:
    shape = extents(size)
    if len(shape) != 2 or not shape[1]:
        raise ShapeError(f"embedding {label!r}: size is {tuple(size)}, it must be [rows, dim]")
    rows = shape[0]
    if rows is None and not distributed:
        raise IdError(
            f"embedding {label!r}: size is {tuple(size)}; the number of rows may be left "
            "open with is_distributed=True only"
        )
    return -1 if rows is None else rows, shape[1]
