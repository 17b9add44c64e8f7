"""Sums in twice the precision of float32, for psfleet's own counts."""

from collections.abc import Callable
from dataclasses import dataclass

from psfleet.rules.rule import Rule, Slot

__all__ = ["ExactSum"]


def exact_sum(w, g, rest, h):  # type: ignore[no-untyped-def]  # inlined into kernels as text
    total = w + g
    part = total - w
    rest = rest + ((w - (total - part)) + (g - part))
    result = total + rest
    return result, rest - (result - total)


@dataclass(frozen=True)
class ExactSum(Rule):
    """w + rest += g, where w is the sum in float32 and rest what that leaves out.

    The addition of a double word and a word (Joldes, Muller and Popescu, "Tight and rigorous error bounds
    for basic building blocks of double-word arithmetic", ACM TOMS 44(2), 2017, algorithm 4): its relative
    error is at most 2**-47, and sums of whole numbers are exact below 2**47. The learning rate is unused.
    """

    name = "exact_sum"
    counts = True

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("rest"),)

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        return exact_sum

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        return (learning_rate,)
