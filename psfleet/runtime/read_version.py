"""State of a running job that a pull has read, or that a follower has."""

import time
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ReadVersion:
    """Version of the values of one pull.

    Attributes:
        rounds: Sync mode: the last closed round of the server that is behind and of the one that is ahead.
            Equal: the values are those of this round, bit for bit. Other modes: (0, 0).
        steps: By table how many updates its values have, on the server with the fewest and on the one with
            the most. In modes other than sync at least so many.
    """

    rounds: tuple[int, int]
    steps: Mapping[str, tuple[int, int]]

    @property
    def is_cut(self) -> bool:
        """True if all servers gave values of the same round, of which there is at least one."""
        return self.rounds[0] == self.rounds[1] > 0


@dataclass(frozen=True)
class FollowedCut:
    """The cut of the training that a follower has.

    Attributes:
        round: Sync mode: the last closed round. Other modes: None.
        pushes: By server, for each worker: its incarnation, and its last push in the cut.
        at: Time (time.monotonic) at which it was the newest.
        number: Rises with each change: the round, or the number of all pushes.
    """

    round: int | None
    pushes: tuple[Mapping[int, tuple[int, int]], ...]
    at: float
    number: int

    @property
    def age(self) -> float:
        """Seconds since it was the newest."""
        return max(time.monotonic() - self.at, 0.0)
