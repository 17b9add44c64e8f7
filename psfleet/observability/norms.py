"""Histograms of norms that cost one increment each."""

from dataclasses import dataclass, field

__all__ = ["NormHistogram"]

_SCALE = 64  # squares are counted in units of 2**-64
_FIRST, _LAST = -14, 14  # buckets that are shown: up to 2**-14, ..., up to 16384


@dataclass(slots=True)
class NormHistogram:
    """Norms by powers of two. Whoever measures fills it without a call of Python:

        norms.counts[int(square * norms.UNIT).bit_length()] += 1  # the square must be finite
        norms.total += square**0.5

    Attributes:
        counts: How many squared norms were less than 2**index / UNIT, and not less than half of it.
        total: Sum of all norms.
    """

    UNIT = 2.0**_SCALE

    counts: list[int] = field(default_factory=lambda: [0] * 256)
    total: float = 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds and how many norms were below, as Prometheus wants them."""
        found = [
            (f"{2.0**power:.10g}", float(sum(self.counts[: _SCALE + 2 * power + 1])))
            for power in range(_FIRST, _LAST + 1)
        ]
        return [*found, ("+Inf", float(sum(self.counts)))]
