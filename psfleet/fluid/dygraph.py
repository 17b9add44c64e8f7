"""Paddle's older interface of eager mode, `fluid.dygraph`, with its layers and learning-rate schedules.

    with fluid.dygraph.guard():
        model = fluid.dygraph.Linear(4, 1)
        loss = fluid.layers.mean(model(fluid.dygraph.to_variable(x)))
        loss.backward()

The layers are those of `fluid.nn`, with older names of arguments.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from psfleet.core.base.errors import ShapeError
from psfleet.core.base.validation.annotations import Range, checked
from psfleet.core.graph.program.program import eager_guard
from psfleet.core.graph.program.variable import Variable, no_grad, to_variable
from psfleet.fluid import nn
from psfleet.fluid.eager_schedules import (
    CosineDecay,
    ExponentialDecay,
    InverseTimeDecay,
    LambdaDecay,
    LinearLrWarmup,
    MultiStepDecay,
    NaturalExpDecay,
    NoamDecay,
    PiecewiseDecay,
    PolynomialDecay,
    ReduceLROnPlateau,
    StepDecay,
)
from psfleet.fluid.layer_modules import Layer, Sequential, load_dygraph, save_dygraph
from psfleet.fluid.nn import BatchNorm
from psfleet.layers.activations import activate

__all__ = [
    "BatchNorm",
    "CosineDecay",
    "Dropout",
    "Embedding",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LambdaDecay",
    "Layer",
    "Linear",
    "LinearLrWarmup",
    "MultiStepDecay",
    "NaturalExpDecay",
    "NoamDecay",
    "PiecewiseDecay",
    "PolynomialDecay",
    "ReduceLROnPlateau",
    "Sequential",
    "StepDecay",
    "guard",
    "load_dygraph",
    "no_grad",
    "save_dygraph",
    "to_variable",
]


@contextlib.contextmanager
def guard(place: Any = None) -> Iterator[None]:
    """Context of eager mode: operations inside the block are computed at once. `place` has no effect."""
    with eager_guard():
        yield


@checked
class Linear(nn.Linear):
    """Fully connected layer act(x @ weight + bias), with older names of arguments.

    Args:
        input_dim, output_dim: Extents of the weight.
        param_attr, bias_attr: Attributes of weight and bias. False for `bias_attr` means no bias.
        act: Name of an activation (psfleet.layers.activations), or None.
        dtype: Accepted for Paddle scripts, without effect.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        param_attr: Any = None,
        bias_attr: Any = None,
        act: str | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__(input_dim, output_dim, param_attr, bias_attr)
        self._act = act

    def forward(self, *inputs: Variable, **options: Any) -> Variable:
        """Return [..., out] for an input [..., in]."""
        return activate(super().forward(*inputs), self._act)


@checked
class Embedding(nn.Embedding):
    """Embedding layer, which looks up rows of a table by id, with older arguments.

    Args:
        name_scope: Name of the layer. It may be omitted: `Embedding([rows, dim])`.
        size: [rows, dim].
        is_sparse: True if the gradient has only the rows of the batch.
        is_distributed: True has the same effect as `is_sparse`.
        padding_idx: Id that gives zeros. Its row is never updated.
        param_attr: Attributes of the table.
        dtype: Accepted for Paddle scripts, without effect.
    """

    def __init__(
        self,
        name_scope: str | Sequence[int],
        size: Any = None,
        is_sparse: bool = False,
        is_distributed: bool = False,
        padding_idx: int | None = None,
        param_attr: Any = None,
        dtype: str = "float32",
    ) -> None:
        has_scope = isinstance(name_scope, str)
        shape = size if has_scope else name_scope
        if not has_scope and isinstance(size, bool):  # Embedding(size, is_sparse)
            is_sparse = size
        if not isinstance(shape, list | tuple) or len(shape) != 2:
            raise ShapeError(f"Embedding: size is {shape!r}, it must be [rows, dim]")
        super().__init__(
            shape[0],
            shape[1],
            padding_idx,
            is_sparse or is_distributed,
            param_attr,
            name_scope if isinstance(name_scope, str) else None,
        )

    def forward(self, *inputs: Variable, **options: Any) -> Variable:
        """Return rows [..., dim] for ids [..., 1] or [...]."""
        (ids,) = inputs
        return super().forward(
            ids.reshape(ids.numpy().shape[:-1]) if ids.shape[-1:] == (1,) else ids
        )


@checked
class Dropout(nn.Dropout):
    """Dropout layer with older arguments: sets values to 0 at random in training, as layers.dropout does.

    Args:
        p: Probability that a value is set to 0.
        seed: Seed of the mask, or None for the program's seed.
        dropout_implementation: As in layers.dropout.
        is_test: True to compute as after `eval()`.
    """

    def __init__(
        self,
        p: Annotated[float, Range(0, 1)] = 0.5,
        seed: int | None = None,
        dropout_implementation: nn.DropoutMode = "downgrade_in_infer",
        is_test: bool = False,
    ) -> None:
        super().__init__(p, dropout_implementation)
        self.training = not is_test
