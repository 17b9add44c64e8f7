"""Layers that a model begins with: fed inputs, constants, the features of a FeatureSet, and rows of a table.

`features` returns all inputs that a FeatureSet describes. `embedding` looks up rows of one table.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from psfleet.core.base.errors import IdError, ShapeError, UsageError
from psfleet.core.base.validation.annotations import AnyNumber, checked
from psfleet.core.engine.schema.entry import Entry, ShowClickEntry, part_of
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program import names
from psfleet.core.graph.program.attribute import ParamAttr, attribute, make_parameter
from psfleet.core.graph.program.operation import dtype_of, extents
from psfleet.core.graph.program.ops.embedding import DenseEmbedding, Embedding, PooledEmbedding
from psfleet.core.graph.program.ops.manipulate import FillConstant, Reshape
from psfleet.core.graph.program.program import default_main_program
from psfleet.core.graph.program.variable import Variable, apply, leaf
from psfleet.data.feature_sets.feature_set import Feature, FeatureSet, Table

__all__ = ["data", "embedding", "features", "fill_constant", "ones", "zeros"]


@checked
def data(
    name: str,
    shape: Sequence[int | None],
    dtype: DTypeLike = "float32",
    lod_level: int = 0,
    stop_gradient: bool = True,
) -> Variable:
    """Declare an input of the program. Each run must feed a value for it.

        label = layers.data("label", [None, 1])
        exe.run(feed={"label": np.zeros((8, 1), np.float32)})

    Args:
        name: Key of the input in the feed.
        shape: Shape including the batch axis. None or -1 is an extent that each feed may choose.
        dtype: float32, or int64 for ids and labels.
        lod_level: Must be 0, because psfleet has no nested sequences.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"the name of data is {name!r}; it must be a text")
    variable = Variable(name, extents(shape), dtype_of(dtype), stop_gradient=stop_gradient)
    variable.is_data = True
    default_main_program().add(variable)
    return variable


@checked
def fill_constant(
    shape: Sequence[int],
    dtype: DTypeLike,
    value: AnyNumber,
    force_cpu: bool = False,
    out: Any = None,
) -> Variable:
    """Return a variable with every element equal to `value`."""
    return apply(FillConstant(tuple(shape), dtype_of(dtype).name, value))


@checked
def ones(shape: Sequence[int], dtype: DTypeLike = "float32") -> Variable:
    """Return a variable filled with ones."""
    return fill_constant(shape, dtype, 1)


@checked
def zeros(shape: Sequence[int], dtype: DTypeLike = "float32") -> Variable:
    """Return a variable filled with zeros."""
    return fill_constant(shape, dtype, 0)


@checked
def features(features: FeatureSet) -> dict[str, Variable]:
    """Return a variable for each feature of a set, by name and in the order of the set.

        values = layers.features(feature_set)
        hidden = layers.fc(layers.concat(list(values.values()), axis=1), 64, act="relu")
        ...
        exe.run(feed={**psfleet.features.feed(feature_set, batch), "label": labels})

    A variable is float32 [samples, dim]. With pooling "none" it is [n, dim], with one row for each id, or
    with `last` [samples, last, dim].

    The rows of all features are pulled with one call to each server, and their gradients are sent in one
    push. A table that has an optimizer is updated by it. Other tables are updated by the optimizer that
    minimizes the loss.

    Args:
        features: The feature set. A Feature is fed as `NAME.ids`, `NAME.lengths` and, if it has weights,
            `NAME.weights`. A Number is fed as `NAME`. `psfleet.features.feed` makes these feeds from a batch.
    """
    inputs = {}
    # A backward pass runs from the last operation to the first. Adding the features in reverse order makes
    # the gradients of features that share a table come in the order of the set. Other interfaces sum them
    # in this order too, and results must be bit-identical.
    for feature in reversed(list(features)):
        if isinstance(feature, Feature):
            inputs[feature.name] = _looked_up(feature)
        else:
            inputs[feature.name] = data(feature.name, [None, feature.dim])
    return {name: inputs[name] for name in features.features}


def _looked_up(feature: Feature) -> Variable:
    name = feature.name
    ids = data(f"{name}.ids", [None], "int64")
    lengths = data(f"{name}.lengths", [None], "int64")
    weights = [data(f"{name}.weights", [None])] if feature.weighted else []
    pool = PooledEmbedding(mean=feature.pooling == "mean")
    values = apply(pool, ids, leaf(_parameter(feature.table)), lengths, *weights, name=name)
    if feature.pooling == "none" and feature.last:
        return apply(Reshape((-1, feature.last, feature.table.dim)), values, name=name)
    return values


def _parameter(table: Table) -> Parameter:
    parameter = make_parameter(
        (-1, table.dim),
        table.name,
        ParamAttr(initializer=table.initializer, precision=table.precision, servers=table.servers),
        None,
        sparse=True,
        distributed=True,
        entry=table.entry,
    )
    parameter.optimizer = table.optimizer
    return parameter


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
    """Look up the rows of a table by id. Returns a variable [*input.shape, dim].

        users = layers.embedding(layers.data("user", [None], "int64"), [None, 16], is_distributed=True)

    Args:
        input: int64 ids of any shape.
        size: [rows, dim]. With `is_distributed`, rows may be None.
        is_sparse: True if the gradient has only the rows of the batch, so that other rows are not updated.
        is_distributed: True if ids may be any int64. A row is created by its first update. Implies is_sparse.
        padding_idx: Id that gives zeros. Its row is never updated.
        param_attr: Attributes of the weights `name.w_0`. By default their initial values are uniform in
            [-0.01, 0.01), the same for sparse and dense tables.
        dtype: dtype of the rows.
        name: Name of the layer, or None to number it.
        entry: With `is_distributed`, the rule that decides which new ids get a row, such as
            psfleet.CountFilterEntry. A ShowClickEntry names two inputs, the shows and clicks of the ids.
            Declare them before with layers.data, of any dtype, in the shape of `input` or with one value
            for each sample. Runs that do not train need not feed them. In eager mode each id has one show
            and no click.
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
    """Return the program's inputs with shows and clicks, if the entry is a ShowClickEntry."""
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
