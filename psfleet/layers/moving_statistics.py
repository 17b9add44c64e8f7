"""Statistics that batch normalisation keeps of earlier batches."""

from psfleet import initializer
from psfleet.errors import ConfigError
from psfleet.parameters.binding import promise
from psfleet.parameters.parameter import Parameter
from psfleet.program.attribute import ParamAttr, make_parameter


def channel_axis(data_layout: str, rank: int) -> int:
    """Return the axis of an input's channels: NCHW and NC have them second, NHWC last."""
    if data_layout not in ("NCHW", "NHWC"):
        raise ConfigError(f"batch_norm: data_layout is {data_layout!r}, use NCHW or NHWC")
    return rank - 1 if data_layout == "NHWC" else 1


def moving_average(shape: tuple[int, ...], name: str, start: float, momentum: float) -> Parameter:
    """A parameter that no optimizer trains: a moving average of what batches show."""
    attributes = ParamAttr(trainable=False, do_model_average=False, need_clip=False)
    parameter = make_parameter(shape, name, attributes, initializer.Constant(start))
    promise(parameter, momentum)
    return parameter
