"""Gradient merge: one push for the gradients of several steps."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from psfleet.parameters.gradients import Grad, scaled
from psfleet.program.gradient import summed
from psfleet.strategy import GradientMergeSettings

__all__ = ["GradientMerger"]

P = TypeVar("P")


class GradientMerger(Generic[P]):
    """Keeps the gradients of steps and gives their sum or mean every k-th time; P: what has gradients.

    Gradients are added in the order of the steps; rows of sparse ones are kept side by side and
    summed by the push. What waits when training ends before a k-th step is not applied.
    """

    def __init__(self, settings: GradientMergeSettings) -> None:
        self._settings = settings
        self._kept: dict[int, tuple[P, Grad]] = {}
        self._steps = 0
        self._samples = 0

    @property
    def waiting(self) -> int:
        """How many steps' gradients wait to be merged."""
        return self._steps

    def take(
        self, pairs: Sequence[tuple[P, Grad]], samples: int
    ) -> tuple[list[tuple[P, Grad]], int] | None:
        """Take one step's gradients; they must not be changed afterwards.

        Returns:
            The merged gradients and their samples if this was a k-th step, else None.
        """
        for parameter, grad in pairs:
            before = self._kept.get(id(parameter))
            self._kept[id(parameter)] = (
                parameter,
                grad if before is None else summed(before[1], grad),
            )
        self._steps += 1
        self._samples += samples
        if self._steps < self._settings.k_steps:
            return None
        factor = 1 / self._steps if self._settings.avg and self._steps > 1 else 1.0
        merged = [
            (p, grad if factor == 1 else scaled(grad, factor)) for p, grad in self._kept.values()
        ]
        total, self._steps, self._samples = self._samples, 0, 0
        self._kept.clear()
        return merged, total
