"""Histograms that cost one increment for each call; without NumPy, as the launcher reads them."""

from dataclasses import dataclass, field

_FIRST, _LAST = 14, 36  # buckets that are shown: up to 16 microseconds, ..., up to 69 seconds


@dataclass(slots=True)
class LatencyHistogram:
    """Durations by powers of two of a nanosecond. Whoever measures fills it without a call:

        spent = time.perf_counter_ns() - began
        latency.counts[spent.bit_length()] += 1
        latency.total += spent

    Two threads that count at the same moment may lose a count; a lock would cost more than the call.

    Attributes:
        counts: Numbers of durations less than 2**index ns, and not less than half of it.
        total: Sum of all durations in ns.
    """

    counts: list[int] = field(default_factory=lambda: [0] * 64)
    total: int = 0
    name: str = ""

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds in seconds and how many durations were below, as Prometheus wants them."""
        bounds = [
            (f"{2**index / 1e9:.6g}", float(sum(self.counts[: index + 1])))
            for index in range(_FIRST, _LAST + 1)
        ]
        return [*bounds, ("+Inf", float(sum(self.counts)))]


_SCALE = 64  # squares are counted in units of 2**-64
_FIRST_NORM, _LAST_NORM = -14, 14  # buckets that are shown: up to 2**-14, ..., up to 16384


@dataclass(slots=True)
class NormHistogram:
    """Norms by powers of two. The measuring code fills it without a call of Python:

        norms.counts[int(square * norms.UNIT).bit_length()] += 1  # the square must be finite
        norms.total += square**0.5

    Attributes:
        counts: Numbers of squared norms less than 2**index / UNIT, and not less than half of it.
    """

    UNIT = 2.0**_SCALE

    counts: list[int] = field(default_factory=lambda: [0] * 256)
    total: float = 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds and how many norms were below, as Prometheus wants them."""
        bounds = [
            (f"{2.0**power:.10g}", float(sum(self.counts[: _SCALE + 2 * power + 1])))
            for power in range(_FIRST_NORM, _LAST_NORM + 1)
        ]
        return [*bounds, ("+Inf", float(sum(self.counts)))]
