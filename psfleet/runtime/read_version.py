"""Which state of a running job a pull has read."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ReadVersion"]


@dataclass(frozen=True)
class ReadVersion:
    """Of the values of one pull.

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
        """Whether all servers gave values of the same round, of which there is at least one."""
        return self.rounds[0] == self.rounds[1] > 0
