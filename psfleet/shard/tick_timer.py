"""When a shard is to be told that time has passed."""

__all__ = ["TickTimer"]


class TickTimer:
    """How long a shard has not been told of. Time in which nobody asks for ticks does not count.

    Args:
        now: Seconds, of a clock that never goes back.
    """

    def __init__(self, now: float) -> None:
        self._told = now

    def due(self, every: float, now: float) -> float:
        """Seconds to tell the shard; 0: it is not time yet.

        Args:
            every: The shard's `tick_every`.
        """
        if not every:
            self._told = now
        passed = now - self._told
        return passed if every and passed >= every else 0.0

    def told(self, now: float) -> None:
        """The shard knows."""
        self._told = now
