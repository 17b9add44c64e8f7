"""Work beside the serving of calls: a piece, then a rest."""

import time
from collections.abc import Callable

__all__ = ["Throttle"]

_LEAST = 0.0005  # seconds of a rest: whoever waits for the interpreter or a table comes first


class Throttle:
    """How long a thread rests, so that it takes no more than a share of one processor.

    A lower priority would not do: a thread that has the interpreter or the lock of a table, and is kept
    from the processor by others, keeps every call of this process waiting.

    Args:
        share: In (0, 1]: of the time in which it works or rests, the part in which it works.
        worked: The processor's time, in seconds, that the thread has had.
        sleep: Rests so many seconds.
    """

    def __init__(
        self,
        share: float,
        worked: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rest = 1 / share - 1
        self._worked = worked
        self._sleep = sleep
        self._rested_at = worked()

    def rest(self) -> None:
        """Rest in proportion to the work since the last rest; called by the thread itself."""
        self._sleep(max(_LEAST, (self._worked() - self._rested_at) * self._rest))
        self._rested_at = self._worked()
