"""What a worker measures of its steps; filled by additions alone."""

import time
from dataclasses import dataclass, field

from psfleet.observability.latency import LatencyHistogram

__all__ = ["StepTimes"]


@dataclass
class StepTimes:
    """Times are in ns. What none of them counts is the script's own work.

    Attributes:
        pull: Spent until values were there; in sync mode with waiting for the round.
        push: Spent to lay out gradients and hand them over.
        wait: Spent for acknowledgements, and at barriers and reductions.
        data: Spent by the loops of the fleet until a batch was there.
        steps: From push to push.
        samples: Behind all pushes.
        loss: That came with the last push; None: none.
    """

    pull: int = 0
    push: int = 0
    wait: int = 0
    data: int = 0
    steps: LatencyHistogram = field(default_factory=LatencyHistogram)
    samples: int = 0
    loss: float | None = None
    _pushed: int = 0

    def pushed(self, samples: int, loss: float | None) -> None:
        """A push is made."""
        now = time.perf_counter_ns()
        if self._pushed:
            spent = now - self._pushed
            self.steps.counts[spent.bit_length()] += 1
            self.steps.total += spent
        self._pushed, self.loss = now, loss
        self.samples += samples
