"""Layers of programs with Paddle's newer argument names (`paddle.static.nn`)."""

from collections.abc import Sequence
from typing import Any

from psfleet import layers
from psfleet.core.base.validation.annotations import checked
from psfleet.core.engine.schema.entry import Entry
from psfleet.core.graph.program.variable import Variable
from psfleet.layers import batch_norm

__all__ = ["batch_norm", "embedding", "fc"]


@checked
def fc(
    x: Variable | Sequence[Variable],
    size: int,
    num_flatten_dims: int = 1,
    weight_attr: Any = None,
    bias_attr: Any = None,
    activation: str | None = None,
    name: str | None = None,
) -> Variable:
    """Add a fully connected layer to the program: psfleet.layers.fc with Paddle's newer names of
    arguments."""
    return layers.fc(x, size, num_flatten_dims, weight_attr, bias_attr, activation, name)


@checked
def embedding(
    input: Variable,
    size: Sequence[int | None],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: str = "float32",
    entry: Entry | None = None,
) -> Variable:
    """Look up the rows of a table by id, as psfleet.layers.embedding does."""
    return layers.embedding(
        input, size, is_sparse, is_distributed, padding_idx, param_attr, dtype, entry=entry
    )
