"""The norm of all stages' gradients, for clipping by the global norm."""

import contextlib
from collections.abc import Sequence

import numpy as np

from psfleet.errors import ConfigError
from psfleet.parameters import gradient_norms
from psfleet.stages.links import exchange, here, links, next_step

__all__ = ["shared_norms"]


def shared_norms(names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Inside the block a global norm is over the parameters of all stages of this worker.

    Args:
        names: Of all of them, in the order in which one process would add them up.
    """
    if here().processes == 1:
        return contextlib.nullcontext()
    places = {name: i for i, name in enumerate(names)}

    def gather(own: list[str], squares: list[float]) -> list[float]:
        place, far, tag = here(), links(), f"norm/{next_step()}"
        if max(place.copies) > 1:
            raise ConfigError(
                "clipping by the global norm needs whole gradients, and copies of a stage "
                "have parts of them; clip each gradient by its norm or use no copies"
            )
        mine = np.array([[places[name] for name in own], squares], np.float64)
        parts = exchange(place, far, tag, range(place.processes), [mine])
        whole = np.concatenate([part for [part] in parts], axis=1)
        return [float(square) for square in whole[1, np.argsort(whole[0], kind="stable")]]

    return gradient_norms.gathering(gather)
