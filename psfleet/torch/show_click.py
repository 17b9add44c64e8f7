"""Shows and clicks of an embedding's ids, given by id, by sample or by bag."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from psfleet.errors import ShapeError
from psfleet.program.ops.embedding import spread

Floats = NDArray[np.float32]


def scores_of(
    ids: Tensor, shows: Tensor | None, clicks: Tensor | None, ends: Tensor | None = None
) -> Floats:
    """Return the shows and clicks of each id: float32 [n, 2].

    Args:
        ids: Ids of a lookup, any shape.
        shows: In the shape of the ids, or one number for each sample (bag); None: once.
        clicks: Likewise; None: never.
        ends: For flat ids: start of each bag, and the number of ids.

    Raises:
        ShapeError: They are neither.
    """
    columns = [
        np.full(ids.numel(), default, np.float32)
        if counts is None
        else _by_id(name, ids, counts, ends)
        for name, counts, default in (("shows", shows, 1), ("clicks", clicks, 0))
    ]
    return np.stack(columns, axis=1)


def _by_id(name: str, ids: Tensor, values: Tensor, ends: Tensor | None) -> Floats:
    counts = values.detach().cpu().numpy()
    if ends is None or counts.shape == tuple(ids.shape):
        return spread(name, counts, tuple(ids.shape)).reshape(-1)
    bags = np.diff(ends.cpu().numpy())
    if counts.size != len(bags):
        raise ShapeError(
            f"{name!r} has shape {counts.shape} for {len(bags)} bags of {ids.numel()} ids; give one "
            "value for each bag or each id"
        )
    return np.repeat(counts.reshape(-1), bags).astype(np.float32)
