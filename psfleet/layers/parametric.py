"""Fully connected layers, matrix products, dropout and normalization.

The parameters of a layer are stored in the fleet's tables under `name.w_0`, `name.b_0` and so on.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from psfleet import initializer
from psfleet.core.base.errors import ConfigError, ShapeError
from psfleet.core.base.validation.annotations import NonNegative, PositiveInt, Range, checked
from psfleet.core.graph.parameters.binding import promise
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program import names
from psfleet.core.graph.program.attribute import (
    Attribute,
    ParamAttr,
    attribute,
    create_parameter,
    make_parameter,
)
from psfleet.core.graph.program.operation import axis_of, size_of
from psfleet.core.graph.program.ops import activation as dropping
from psfleet.core.graph.program.ops.arithmetic import Add
from psfleet.core.graph.program.ops.matmul import Affine, MatMul
from psfleet.core.graph.program.ops.normalize import BatchNorm, LayerNorm
from psfleet.core.graph.program.variable import Variable, apply, as_variable, leaf
from psfleet.layers.activations import activate
from psfleet.layers.arithmetic import scale as scaled
from psfleet.layers.reductions import sum as summed

__all__ = ["batch_norm", "create_parameter", "dropout", "fc", "layer_norm", "matmul"]


def channel_axis(data_layout: str, rank: int) -> int:
    """Return the number of the channel axis of an input: 1 for NCHW and NC, the last axis for NHWC."""
    if data_layout not in ("NCHW", "NHWC"):
        raise ConfigError(f"batch_norm: data_layout is {data_layout!r}, use NCHW or NHWC")
    return rank - 1 if data_layout == "NHWC" else 1


def moving_average(shape: tuple[int, ...], name: str, start: float, momentum: float) -> Parameter:
    """Make a parameter for a moving average of the batches' statistics. No optimizer trains it.

    Args:
        start: Initial value.
        momentum: Weight of the previous average in each update.
    """
    attributes = ParamAttr(trainable=False, do_model_average=False, need_clip=False)
    parameter = make_parameter(shape, name, attributes, initializer.Constant(start))
    promise(parameter, momentum)
    return parameter


@checked
def fc(
    input: Variable | Sequence[Variable],
    size: PositiveInt,
    num_flatten_dims: PositiveInt = 1,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Variable:
    """Fully connected layer: act(sum of input_i @ w_i + b).

        hidden = layers.fc(x, 64, act="relu")

    Args:
        input: A variable, or a list of variables. Each variable has its own weights `name.w_0`, `name.w_1`,
            ...
        size: Number of outputs.
        num_flatten_dims: Number of leading axes that the output keeps. The other axes of an input are
            flattened to one axis.
        param_attr: Attributes of the weights, or a list with attributes for each input. The default is
            Xavier initialization.
        bias_attr: Attributes of the bias `name.b_0`, or False for no bias. Initialized to 0 by default.
        act: Name of an activation (psfleet.layers.activations), or None.
        name: Name of the layer, or None to number it.
    """
    label = name or names.generate("fc")
    inputs = [input] if isinstance(input, Variable) else [as_variable(x) for x in input]
    attributes = param_attr if isinstance(param_attr, list | tuple) else [param_attr] * len(inputs)
    if not inputs or len(attributes) != len(inputs):
        raise ShapeError(f"fc {label!r} has {len(inputs)} inputs and {len(attributes)} param_attr")
    weights = [
        _weights(x, size, num_flatten_dims, f"{label}.w_{i}", attr)
        for i, (x, attr) in enumerate(zip(inputs, attributes, strict=True))
    ]
    bias = _vector(size, f"{label}.b_0", bias_attr, 0.0)
    biases = [] if bias is None else [bias]
    if len(inputs) == 1:
        op = Affine(axis_of(num_flatten_dims, (*inputs[0].shape, None), "fc"), act == "relu")
        out = apply(op, inputs[0], weights[0], *biases, name=label)
        return out if act == "relu" else activate(out, act, label)
    parts = [apply(Affine(num_flatten_dims), x, w) for x, w in zip(inputs, weights, strict=True)]
    total = summed(parts)
    out = apply(Add(), total, *biases, name=label) if biases else total
    return activate(out, act, label)


def _weights(x: Variable, size: int, axes: int, name: str, argument: Attribute) -> Variable:
    width = size_of(x.shape[axes:])
    if width is None:
        raise ShapeError(
            f"fc of {x.name!r} {x.shape}: the extents from axis {axes} on must be known"
        )
    attr = attribute(argument)
    if attr is None:
        raise ShapeError(f"fc of {x.name!r}: param_attr is False, but weights there must be")
    return leaf(make_parameter((width, size), name, attr, initializer.Xavier()))


def _vector(size: int, name: str, argument: Attribute, start: float) -> Variable | None:
    """Make a parameter vector with the initial value `start`, or return None if `argument` is False."""
    attr = attribute(argument)
    if attr is None:
        return None
    return leaf(make_parameter((size,), name, attr, initializer.Constant(start)))


@checked
def matmul(
    x: Any,
    y: Any,
    transpose_x: bool = False,
    transpose_y: bool = False,
    alpha: float = 1.0,
    name: str | None = None,
) -> Variable:
    """Return alpha * x @ y. The product is over the last two axes, and leading axes are broadcast."""
    out = apply(MatMul(transpose_x, transpose_y), x, y, name=name)
    return out if alpha == 1.0 else scaled(out, alpha)


@checked
def dropout(
    x: Variable,
    dropout_prob: Annotated[float, Range(0, 1)],
    is_test: bool = False,
    seed: int | None = None,
    name: str | None = None,
    dropout_implementation: Literal[
        "downgrade_in_infer", "upscale_in_train"
    ] = "downgrade_in_infer",
) -> Variable:
    """Set values to 0 at random during training, and not in programs cloned for tests.

        hidden = layers.dropout(layers.fc(x, 64, act="relu"), 0.5)

    The mask depends only on the seed, the layer's name and the step of the program, so a repeated training
    run is bit-identical.

    Args:
        x: Variable.
        dropout_prob: Probability p that a value is set to 0.
        is_test: True to compute as in a program cloned for tests.
        seed: Seed of the mask, or None for the program's random_seed.
        name: Name of the layer, or None to number it.
        dropout_implementation: `downgrade_in_infer` gives x * mask in training and x * (1 - p) in tests;
            `upscale_in_train` gives x * mask / (1 - p) in training and x in tests.
    """
    label = name or names.generate("dropout")
    op = dropping.Dropout(
        label, float(dropout_prob), is_test, seed, dropout_implementation == "upscale_in_train"
    )
    return apply(op, x, name=label)


@checked
def layer_norm(
    input: Variable,
    scale: bool = True,
    shift: bool = True,
    begin_norm_axis: PositiveInt = 1,
    epsilon: NonNegative = 1e-5,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Variable:
    """Layer normalization: normalize each sample to mean 0 and variance 1, then scale and shift it.

    The result is (x - mean) / sqrt(variance + epsilon) * `name.w_0` + `name.b_0`.

    Args:
        input: Variable whose first axis is the batch.
        scale, shift: False for no scale `name.w_0` or no shift `name.b_0`.
        begin_norm_axis: Mean and variance are computed over the axes from this one to the last.
        epsilon: Number added to the variance, at least 0.
        param_attr, bias_attr: Attributes of the scale and of the shift.
        act: Name of an activation (psfleet.layers.activations), or None.
        name: Name of the layer, or None to number it.
    """
    label = name or names.generate("layer_norm")
    width = size_of(input.shape[begin_norm_axis:])
    if width is None:
        raise ShapeError(
            f"layer_norm of {input.name!r} {input.shape}: the extents from axis "
            f"{begin_norm_axis} on must be known"
        )
    factor = _vector(width, f"{label}.w_0", param_attr if scale else False, 1.0)
    offset = _vector(width, f"{label}.b_0", bias_attr if shift else False, 0.0)
    weights = [weight for weight in (factor, offset) if weight is not None]
    op = LayerNorm(begin_norm_axis, epsilon, factor is not None, offset is not None)
    return activate(apply(op, input, *weights, name=label), act, label)


@checked
def batch_norm(
    input: Variable,
    act: str | None = None,
    is_test: bool = False,
    momentum: Annotated[float, Range(0, 1)] = 0.9,
    epsilon: NonNegative = 1e-5,
    param_attr: Any = None,
    bias_attr: Any = None,
    data_layout: str = "NCHW",
    in_place: bool = False,
    name: str | None = None,
    moving_mean_name: str | None = None,
    moving_variance_name: str | None = None,
    do_model_average_for_mean_and_var: bool = True,
    use_global_stats: bool = False,
) -> Variable:
    """Batch normalization: normalize each channel to mean 0 and variance 1, then scale and shift it.

    The result is (x - mean) / sqrt(variance + epsilon) * `name.w_0` + `name.b_0`.

    - In training, mean and variance are those of the worker's batch. Each update of the optimizer also
      updates the moving statistics: moving = momentum * moving + (1 - momentum) * batch.
    - Programs cloned for tests and inference models use the moving statistics. These are the parameters
      `name.w_1` (mean, initially 0) and `name.w_2` (biased variance, initially 1), stored in dense tables and
      saved in checkpoints and inference models.

    A worker sends the statistics of its batch with its gradients. In sync mode the moving statistics are
    updated once per round with the mean over the workers, bit-identical for any number of servers. In other
    modes each push updates them. With merged gradients the mean over the merged batches is sent. A pipeline
    cannot train this layer, because its stages see only parts of a batch.

    Args:
        input: [batch, channels], [batch, channels, ...] or, with NHWC, [batch, ..., channels].
        act: Name of an activation (psfleet.layers.activations), or None.
        is_test: True to compute as in a program cloned for tests.
        momentum: Weight of the previous moving statistics, in [0, 1].
        epsilon: Number added to the variance, at least 0.
        param_attr: Attributes of the scale, or False for no scale. Initialized to 1 by default.
        bias_attr: Attributes of the shift, or False for no shift. Initialized to 0 by default.
        data_layout: Position of the channel axis: NCHW or NHWC.
        in_place, do_model_average_for_mean_and_var: Accepted for Paddle scripts, without effect. ModelAverage
            never averages the moving statistics.
        name: Name of the layer, or None to number it.
        moving_mean_name, moving_variance_name: Names of the moving statistics.
        use_global_stats: True to normalize by the moving statistics in training too, without updating them.

    Raises:
        ConfigError: momentum, epsilon or data_layout is out of range.
        ShapeError: The number of channels is not known.
    """
    label = name or names.generate("batch_norm")
    axis = channel_axis(data_layout, input.ndim)
    channels = input.shape[axis] if input.ndim > 1 else None
    if channels is None:
        raise ShapeError(
            f"batch_norm of {input.name!r} {input.shape}: it must be [batch, channels, ...] with a "
            "known number of channels"
        )
    moving = [
        leaf(moving_average((channels,), given_name or f"{label}.{suffix}", start, momentum))
        for given_name, suffix, start in (
            (moving_mean_name, "w_1", 0.0),
            (moving_variance_name, "w_2", 1.0),
        )
    ]
    factor = _vector(channels, f"{label}.w_0", param_attr, 1.0)
    offset = _vector(channels, f"{label}.b_0", bias_attr, 0.0)
    weights = [weight for weight in (factor, offset) if weight is not None]
    op = BatchNorm(
        axis,
        momentum,
        epsilon,
        is_test,
        use_global_stats,
        has_scale=factor is not None,
        has_shift=offset is not None,
    )
    return activate(apply(op, input, *moving, *weights, name=label), act, label)
