"""Histograms of durations that cost one increment for each call."""

from dataclasses import dataclass, field

__all__ = ["LatencyHistogram"]

_FIRST, _LAST = 14, 36  # buckets that are shown: up to 16 microseconds, ..., up to 69 seconds


@dataclass(slots=True)
class LatencyHistogram:
    """Durations by powers of two of a nanosecond. Whoever measures fills it without a call:

        spent = time.perf_counter_ns() - began
        latency.counts[spent.bit_length()] += 1
        latency.total += spent

    Two threads that count at the same moment may lose a count; a lock would cost more than the call.

    Attributes:
        counts: How many durations were less than 2**index ns, and not less than half of it.
        total: Sum of all durations in ns.
    """

    counts: list[int] = field(default_factory=lambda: [0] * 64)
    total: int = 0

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds in seconds and how many durations were below, as Prometheus wants them."""
        found = [
            (f"{2**index / 1e9:.6g}", float(sum(self.counts[: index + 1])))
            for index in range(_FIRST, _LAST + 1)
        ]
        return [*found, ("+Inf", float(sum(self.counts)))]
