"""Building blocks of programs, under Paddle's names and argument names.

    x = layers.data("x", [None, 4])
    hidden = layers.fc(x, 64, act="relu")
    loss = layers.mean(layers.square(layers.fc(hidden, 1)))

If the inputs are symbolic, as `data` returns them, a layer adds its operation to the default program. If an
input has a value (`psfleet.to_variable`), the layer computes its result at once; this is eager mode.

The parameters of a layer are named `name.w_0`, `name.b_0`. Without the argument `name` the layers of a
program are numbered (`fc_0`, `fc_1`, ...). A second call with the same `name` uses the same parameters.

Each module of this package lists its layers in `__all__`.
"""

from psfleet.layers import (
    activations,
    arithmetic,
    inputs,
    losses,
    manipulation,
    parametric,
    reductions,
    sequences,
)
from psfleet.layers.activations import *
from psfleet.layers.arithmetic import *
from psfleet.layers.inputs import *
from psfleet.layers.losses import *
from psfleet.layers.manipulation import *
from psfleet.layers.parametric import *
from psfleet.layers.reductions import *
from psfleet.layers.sequences import *

__all__: list[str] = []
__all__ += activations.__all__
__all__ += arithmetic.__all__
__all__ += inputs.__all__
__all__ += losses.__all__
__all__ += manipulation.__all__
__all__ += parametric.__all__
__all__ += reductions.__all__
__all__ += sequences.__all__
