"""What the workers of a run have pushed, for its checks."""

import numpy as np

from tests.protocol.fleet.job import Ids


class Pushes(dict[tuple[int, int, int], Ids]):
    """By worker, incarnation and sequence the samples that a push brings.

    `sent`: Likewise the servers to which it was sent. `acknowledged`: server, worker, incarnation and
    sequence of those that a server in a mode without rounds has acknowledged, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[tuple[int, int, int], frozenset[int]] = {}
        self.acknowledged: list[tuple[int, int, int, int]] = []

    def again(self, samples: Ids) -> bool:
        """Whether one of the samples of a push came with another one, too."""
        return sum(bool(np.isin(samples, other).any()) for other in self.values()) > 1
