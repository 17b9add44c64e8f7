"""Building blocks of programs, under the reference's names and argument names.

A layer records its operation in the default program if an input is symbolic (`data`), and computes
at once if one has a value (`psfleet.to_variable`).

A layer that has weights owns the parameters `name.w_0`, `name.b_0`. Without `name` it gets a number
(`fc_0`, `fc_1`, ...) at each call; called again with the same `name` it uses the same parameters.

The layers are those that these modules name in their `__all__`.
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
