"""Layers of eager mode under Paddle's newer names (`paddle.nn`): Linear, Embedding, BatchNorm, Dropout and
others.

Each layer is an object with its parameters (`layer_modules.Layer`). It computes the same operation as the
function of the same name in psfleet.layers. `dygraph.py` has some of these layers with older arguments.
"""

from typing import Annotated, Any, Literal

from psfleet import initializer, layers
from psfleet.core.base.errors import IdError
from psfleet.core.base.validation.annotations import PositiveInt, Range, checked
from psfleet.core.graph.parameters.binding import note
from psfleet.core.graph.program.ops import normalize
from psfleet.core.graph.program.ops.embedding import DenseEmbedding
from psfleet.core.graph.program.ops.embedding import Embedding as SparseEmbedding
from psfleet.core.graph.program.ops.matmul import Affine
from psfleet.core.graph.program.ops.normalize import BatchNorm as BatchNormOp
from psfleet.core.graph.program.program import default_main_program
from psfleet.core.graph.program.variable import Variable, apply
from psfleet.fluid import layer_modules
from psfleet.fluid.layer_modules import Layer, Sequential
from psfleet.layers.activations import activate
from psfleet.layers.parametric import channel_axis, moving_average

__all__ = [
    "BatchNorm",
    "Dropout",
    "Embedding",
    "Layer",
    "LayerNorm",
    "Linear",
    "ReLU",
    "Sequential",
    "Sigmoid",
    "Tanh",
]


DropoutMode = Literal["upscale_in_train", "downscale_in_infer", "downgrade_in_infer"]


@checked
class Linear(layer_modules.Layer):
    """Fully connected layer x @ weight + bias.

    Args:
        in_features, out_features: Extents of the weight.
        weight_attr: Attributes of the weight. Initialized by Xavier by default.
        bias_attr: Attributes of the bias, or False for no bias. Initialized to 0 by default.
        name: Prefix of the parameters' names.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Any = None,
        bias_attr: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name or "linear")
        self.weight = self.create_parameter([in_features, out_features], weight_attr)
        self.bias = (
            None
            if bias_attr is False
            else self.create_parameter([out_features], bias_attr, is_bias=True)
        )

    def forward(self, *inputs: Variable, **options: Any) -> Variable:
        """Return [..., out] for an input [..., in]."""
        (x,) = inputs
        optional_bias = [] if self.bias is None else [self.bias]
        return apply(Affine(max(x.ndim - 1, 0)), x, self.weight, *optional_bias)


@checked
class Embedding(layer_modules.Layer):
    """Embedding layer, which looks up rows of a table by id.

    Args:
        num_embeddings, embedding_dim: Number of rows of the table, and number of weights of a row.
        padding_idx: Id that gives zeros. Its row is never updated. Negative values count from the end.
        sparse: True if the gradient has only the rows of the batch.
        weight_attr: Attributes of the table.
        name: Prefix of the table's name.
    """

    def __init__(
        self,
        num_embeddings: PositiveInt,
        embedding_dim: PositiveInt,
        padding_idx: int | None = None,
        sparse: bool = False,
        weight_attr: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name or "embedding")
        padding = padding_idx
        if padding is not None and not -num_embeddings <= padding < num_embeddings:
            raise IdError(
                f"Embedding: padding_idx is {padding}, it must be in "
                f"[{-num_embeddings}, {num_embeddings})"
            )
        if padding is not None and padding < 0:
            padding += num_embeddings
        self._op = SparseEmbedding(padding) if sparse else DenseEmbedding(padding)
        self.weight = self.create_parameter(
            [num_embeddings, embedding_dim], weight_attr, sparse=sparse, by_row=not sparse
        )

    def forward(self, *inputs: Variable, **options: Any) -> Variable:
        """Return rows [..., dim] for ids [...]."""
        (ids,) = inputs
        return apply(self._op, ids, self.weight)


@checked
class BatchNorm(layer_modules.Layer):
    """Batch normalization layer: normalizes by the batch in training, and by moving averages after `eval()`.

    `weight` and `bias` are trained. `_mean` and `_variance` are the moving averages, which each step of an
    optimizer updates with the batches since the last step. `state_dict` includes all four.

    Args:
        num_channels: Extent of the channel axis.
        act: Name of an activation (psfleet.layers.activations), or None.
        param_attr, bias_attr: Attributes of scale and shift, or False for no scale or shift.
        data_layout: NCHW or NHWC.
        momentum, epsilon, is_test, use_global_stats, moving_mean_name, moving_variance_name: As in
            layers.batch_norm.
        dtype, in_place, do_model_average_for_mean_and_var, trainable_statistics: Accepted for Paddle
        scripts, without effect.
    """

    def __init__(
        self,
        num_channels: int,
        act: str | None = None,
        is_test: bool = False,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        param_attr: Any = None,
        bias_attr: Any = None,
        dtype: str = "float32",
        data_layout: str = "NCHW",
        in_place: bool = False,
        moving_mean_name: str | None = None,
        moving_variance_name: str | None = None,
        do_model_average_for_mean_and_var: bool = True,
        use_global_stats: bool = False,
        trainable_statistics: bool = False,
    ) -> None:
        super().__init__("batch_norm")
        channel_axis(data_layout, 2)
        self._act, self._layout, self._fixed = act, data_layout, use_global_stats
        self._momentum, self._epsilon = momentum, epsilon
        self.training = not is_test
        start_scale = initializer.Constant(1.0)
        shape = [num_channels]
        self.weight = (
            None
            if param_attr is False
            else self.create_parameter(shape, param_attr, default_initializer=start_scale)
        )
        self.bias = (
            None if bias_attr is False else self.create_parameter(shape, bias_attr, is_bias=True)
        )
        self._mean, self._variance = (
            moving_average((num_channels,), name or f"{self.full_name()}.{suffix}", start, momentum)
            for name, suffix, start in (
                (moving_mean_name, "mean", 0.0),
                (moving_variance_name, "variance", 1.0),
            )
        )

    def forward(self, *inputs: Variable, **options: Any) -> Variable:
        """Return the normalized input."""
        (x,) = inputs
        op = BatchNormOp(
            channel_axis(self._layout, x.ndim),
            self._momentum,
            self._epsilon,
            not self.training,
            self._fixed,
            self.weight is not None,
            self.bias is not None,
        )
        scale_and_shift = [weights for weights in (self.weight, self.bias) if weights is not None]
        out = apply(op, x, self._mean, self._variance, *scale_and_shift)
        # In a program the update of the run sends the batch's statistics. In eager mode there is no run, so
        # they are registered for the next push here.
        if out.value is not None:
            for average in default_main_program().take_observed():
                note(*average)
        return activate(out, self._act)


@checked
class Dropout(layer_modules.Layer):
    """Dropout layer: sets values to 0 at random in training, and not after `eval()`.

    Args:
        p: Probability that a value is set to 0.
        mode: `upscale_in_train` computes x * mask / (1 - p) in training and x in evaluation. The other mode
            computes x * mask in training and x * (1 - p) in evaluation.
        name: Name of the layer. The masks depend on it.
    """

    def __init__(
        self,
        p: Annotated[float, Range(0, 1)] = 0.5,
        mode: DropoutMode = "upscale_in_train",
        name: str | None = None,
    ) -> None:
        super().__init__(name or "dropout")
        self._p = p
        self._way = "upscale_in_train" if mode == "upscale_in_train" else "downgrade_in_infer"

    def forward(self, *inputs: Variable, **options: Any) -> Variable:
        """Return the input with some values set to 0."""
        return layers.dropout(
            inputs[0],
            self._p,
            is_test=not self.training,
            name=self.full_name(),
            dropout_implementation=self._way,  # type: ignore[arg-type]
        )


@checked
class LayerNorm(layer_modules.Layer):
    """Layer normalization: normalizes each sample over its last axis, then scales and shifts it.

    Args:
        normalized_shape: Extent of the last axis.
        epsilon: Number added to the variance.
        weight_attr, bias_attr: Attributes of scale and shift.
        name: Prefix of the parameters' names.
    """

    def __init__(
        self,
        normalized_shape: int,
        epsilon: float = 1e-5,
        weight_attr: Any = None,
        bias_attr: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name or "layer_norm")
        self._epsilon = epsilon
        self.weight = self.create_parameter(
            [normalized_shape], weight_attr, default_initializer=initializer.Constant(1.0)
        )
        self.bias = self.create_parameter([normalized_shape], bias_attr, is_bias=True)

    def forward(self, *inputs: Variable, **options: Any) -> Variable:
        """Return the normalized input."""
        (x,) = inputs
        return apply(normalize.LayerNorm(x.ndim - 1, self._epsilon), x, self.weight, self.bias)


@checked
class ReLU(layer_modules.Layer):
    """Layer that returns max(x, 0)."""

    def forward(self, *inputs: Variable, **options: Any) -> Variable:
        """Apply the activation."""
        return layers.relu(inputs[0])


@checked
class Sigmoid(layer_modules.Layer):
    """Layer that returns 1 / (1 + exp(-x))."""

    def forward(self, *inputs: Variable, **options: Any) -> Variable:
        """Apply the activation."""
        return layers.sigmoid(inputs[0])


@checked
class Tanh(layer_modules.Layer):
    """Layer that returns the hyperbolic tangent."""

    def forward(self, *inputs: Variable, **options: Any) -> Variable:
        """Apply the activation."""
        return layers.tanh(inputs[0])
