"""Paddle's older interface `fluid.layers`: all layers of psfleet, a few of them with older arguments.

`data`, `create_global_var`, `embedding` and `sequence_pool` are defined here, with Paddle's arguments and
shapes. All other layers, and learning-rate schedules such as `noam_decay`, are imported from psfleet.
"""

from collections.abc import Sequence
from typing import Any

from numpy.typing import DTypeLike

from psfleet import layers
from psfleet.core.base.validation.annotations import AnyNumber, checked
from psfleet.core.engine.schema.entry import Entry
from psfleet.core.graph.program.ops.manipulate import Reshape
from psfleet.core.graph.program.variable import Variable, apply
from psfleet.fluid import learning_rate_scheduler
from psfleet.fluid.learning_rate_scheduler import autoincreased_step_counter
from psfleet.layers.activations import *
from psfleet.layers.arithmetic import *
from psfleet.layers.inputs import features as features
from psfleet.layers.inputs import fill_constant as fill_constant
from psfleet.layers.inputs import ones as ones
from psfleet.layers.inputs import zeros as zeros
from psfleet.layers.losses import *
from psfleet.layers.manipulation import *
from psfleet.layers.parametric import *
from psfleet.layers.reductions import *
from psfleet.layers.sequences import sequence_first_step as sequence_first_step
from psfleet.layers.sequences import sequence_last_step as sequence_last_step
from psfleet.optimizer.lr import (
    cosine_decay,
    exponential_decay,
    inverse_time_decay,
    linear_lr_warmup,
    natural_exp_decay,
    noam_decay,
    piecewise_decay,
    polynomial_decay,
)

__all__ = [
    "autoincreased_step_counter",
    "cosine_decay",
    "create_global_var",
    "exponential_decay",
    "inverse_time_decay",
    "learning_rate_scheduler",
    "linear_lr_warmup",
    "natural_exp_decay",
    "noam_decay",
    "piecewise_decay",
    "polynomial_decay",
]
__all__ += layers.__all__


@checked
def data(
    name: str,
    shape: Sequence[int | None],
    append_batch_size: bool = True,
    dtype: DTypeLike = "float32",
    lod_level: int = 0,
    type: Any = None,
    stop_gradient: bool = True,
) -> Variable:
    """Declare an input of the program. Each run must feed a value for it.

        x = fluid.layers.data("x", [4])  # shape (None, 4)

    Args:
        name: Key in the feed.
        shape: Shape of a sample. If an extent is -1 or None, or append_batch_size is False, it is the shape
            including the batch axis.
        append_batch_size: False if `shape` includes the batch axis.
        dtype: float32, or int64 for ids and labels.
        lod_level: Must be 0.
        type: Accepted for Paddle scripts, without effect.
        stop_gradient: False to compute gradients with respect to this variable.
    """
    is_open = any(extent is None or extent < 0 for extent in shape)
    whole = [None, *shape] if append_batch_size and not is_open else list(shape)
    return layers.data(name, whole, dtype, lod_level, stop_gradient)


@checked
def create_global_var(
    shape: Sequence[int],
    value: AnyNumber,
    dtype: str,
    persistable: bool = False,
    force_cpu: bool = False,
    name: str | None = None,
) -> Variable:
    """Return a variable filled with a constant, such as a learning rate.

    Args:
        shape, value, dtype: Shape, value and dtype of the variable.
        persistable, force_cpu, name: Accepted for Paddle scripts, without effect.
    """
    return layers.fill_constant(shape, dtype, value)


@checked
def embedding(
    input: Variable,
    size: Sequence[int | None],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: DTypeLike = "float32",
    entry: Entry | None = None,
) -> Variable:
    """Look up the rows of a table by ids [..., 1]. Returns [..., dim]. Arguments are those of
    psfleet.layers.embedding.
    """
    rows = layers.embedding(
        input, size, is_sparse, is_distributed, padding_idx, param_attr, dtype, entry=entry
    )
    if not input.shape or input.shape[-1] != 1:
        return rows
    leading = [0] * (len(input.shape) - 1)
    return apply(Reshape((*leading, int(rows.shape[-1] or 0))), rows)


@checked
def sequence_pool(
    input: Variable,
    pool_type: str,
    is_test: bool = False,
    pad_value: float = 0.0,
    *,
    lengths: Any = None,
    mask: Any = None,
) -> Variable:
    """Pool each padded sequence to one row, as psfleet.layers.sequence_pool does.

    Args:
        input, pool_type, pad_value: As in psfleet.layers.sequence_pool.
        is_test: Accepted for Paddle scripts, without effect.
        lengths, mask: Lengths of the sequences, as in psfleet.layers.sequence_pool. In Paddle they are part
            of the LoDTensor.
    """
    return layers.sequence_pool(input, pool_type, lengths, mask, pad_value)
