"""What a shard has seen, for displays."""

from dataclasses import dataclass, field

from psfleet.shard.events import Push

__all__ = ["MOST", "ShardCounters"]

MOST = 2**62  # that a count may reach; those on the wire have 64 bits


@dataclass
class ShardCounters:
    """Not part of the shard's state.

    Attributes:
        pushes: That were new.
        repeats: Pushes that had come before.
        samples: Behind the pushes of each worker.
        losses: The last one of each worker.
    """

    pushes: int = 0
    repeats: int = 0
    samples: dict[int, int] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    def count(self, push: Push, fresh: bool) -> None:
        """A push has come, for the first time or not."""
        if not fresh:
            self.repeats += 1
            return
        self.pushes += 1
        samples = self.samples.get(push.worker, 0) + push.samples
        self.samples[push.worker] = min(samples, MOST)
        if push.loss is not None:
            self.losses[push.worker] = push.loss
