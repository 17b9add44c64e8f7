"""Measurements of a worker's steps; filled by additions alone."""

import time
from dataclasses import dataclass, field

from psfleet.observability.exposition import LatencyHistogram


@dataclass
class StepTimes:
    """Times are in ns.

    Attributes:
        pull: Spent until values were there; in sync mode with waiting for the round.
        push: Spent to lay out gradients and hand them over.
        wait: Spent for acknowledgements, and at barriers and reductions.
        data: Spent by the loops of the fleet until a batch was there.
        script: The rest of the steps, which is the script's own work. What a second thread spends in
            pulls counts as pulls alone.
        steps: From push to push.
        samples: Behind all pushes.
        loss: That came with the last push; None: none.
    """

    pull: int = 0
    push: int = 0
    wait: int = 0
    data: int = 0
    script: int = 0
    steps: LatencyHistogram = field(default_factory=LatencyHistogram)
    samples: int = 0
    loss: float | None = None
    _pushed: int = 0
    _spent: int = 0  # in all but the script, at the last push

    def pushed(self, samples: int, loss: float | None) -> None:
        """Count a push."""
        now, others = time.perf_counter_ns(), self.pull + self.push + self.wait + self.data
        if self._pushed:
            duration = now - self._pushed
            self.steps.counts[duration.bit_length()] += 1
            self.steps.total += duration
            script = duration + self._spent - others
            if script > 0:
                self.script += script
        self._spent = others
        self._pushed, self.loss = now, loss
        self.samples += samples
