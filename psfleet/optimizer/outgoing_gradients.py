"""Work on gradients between the backward pass and the push: merging several steps, and sending in 16 bits.

`GradientMerger` collects the gradients of k steps and returns their sum or mean (gradient_merge in a
strategy). `GradientScaler` scales gradients to be sent in 16 bits (amp in a strategy). An optimizer has at
most one of each, and merges before it scales.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import NonNegativeInt, Positive, check, checked
from psfleet.core.engine.gradients import Grad, SparseGrad, merge_rows, scaled
from psfleet.core.engine.kernels.number_formats import overflows
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.graph.program.operation import summed
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.strategy import AMPSettings, GradientMergeSettings

_LARGEST_SCALE = 2.0**100  # far beyond what a gradient needs, and within float32


P = TypeVar("P")


class _HasTable(Protocol):
    """Object with the definition of a table, such as a BoundTable."""

    @property
    def spec(self) -> TableSpec: ...


S = TypeVar("S", bound=_HasTable)


class GradientScaler:
    """Marks the gradients of each step to be sent in 16 bits, and adapts the scale.

    float16 overflows above 65,504 and loses values below 2^-25. Gradients sent in float16 are therefore
    multiplied by `scale`, and the servers divide by it. Everything else is computed in float32, so this has
    the same effect as scaling the loss. Clipping and merging happen before, on unscaled gradients. If a
    scaled gradient overflows, or has an infinity or NaN, the step is skipped: this worker pushes no
    gradient.

    Attributes:
        scale: Factor of the next step.
    """

    def __init__(self, settings: AMPSettings) -> None:
        self._settings = settings
        self.scale = settings.init_loss_scaling if settings.dtype == "float16" else 1.0
        self._good = self._bad = (
            0  # good and bad steps since the last other kind or change of scale
        )

    def take(self, gradients: Sequence[tuple[S, Gradient]]) -> list[tuple[S, Gradient]]:
        """Return the gradients to push, marked with their precision. Empty if the step must be skipped."""
        if self._settings.dtype == "float16":
            return self._scaled(gradients)
        return [
            (seat, dataclasses.replace(gradient, precision="bfloat16"))
            for seat, gradient in gradients
        ]

    def _scaled(self, gradients: Sequence[tuple[S, Gradient]]) -> list[tuple[S, Gradient]]:
        sums = [(seat, _summed(seat, gradient)) for seat, gradient in gradients]
        overflow = any(overflows(gradient.values, self.scale) for _, gradient in sums)
        outgoing = (
            []
            if overflow
            else [
                (seat, dataclasses.replace(gradient, precision="float16", scale=self.scale))
                for seat, gradient in sums
            ]
        )
        if self._settings.use_dynamic_loss_scaling:
            self._adjust(overflow)
        return outgoing

    def _adjust(self, overflow: bool) -> None:
        settings = self._settings
        self._good, self._bad = (0, self._bad + 1) if overflow else (self._good + 1, 0)
        if self._bad >= settings.decr_every_n_nan_or_inf:
            self.scale, self._bad = max(self.scale * settings.decr_ratio, 1.0), 0
        if self._good >= settings.incr_every_n_steps:
            self.scale, self._good = min(self.scale * settings.incr_ratio, _LARGEST_SCALE), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the counts of steps."""
        return {"scale": self.scale, "good": self._good, "bad": self._bad}

    @checked
    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state made by `state_dict()`."""
        check_scaling("GradientScaler", state)
        self.scale, self._good, self._bad = state["scale"], state["good"], state["bad"]


def check_scaling(owner: str, state: Any) -> None:
    """Check the state of a GradientScaler.

    Raises:
        UsageError: The state is no dict, or an entry is missing or wrong.
    """
    if not isinstance(state, Mapping):
        raise UsageError(f"{owner}: the state's loss_scaling is {state!r}, it must be a dict")
    for name, kind in (("scale", Positive), ("good", NonNegativeInt), ("bad", NonNegativeInt)):
        check(owner, f"the state's loss_scaling {name}", state.get(name), kind)


def _summed(seat: _HasTable, gradient: Gradient) -> Gradient:
    """Sum the gradient rows of repeated ids. The servers add them, so the overflow check must see the sum."""
    if seat.spec.kind == "dense" or gradient.ids is None:
        return gradient
    sums = merge_rows(SparseGrad(gradient.ids, gradient.spread().values))
    return dataclasses.replace(gradient, values=sums.rows, ids=sums.ids, bags=None)


class GradientMerger(Generic[P]):
    """Collects the gradients of k steps and returns their sum or mean at every k-th step.

    Gradients are added in the order of the steps. Rows of sparse gradients are concatenated; the push sums
    them. If training does not end at a k-th step, `take_waiting` returns the collected gradients. P is the
    type of the parameters.
    """

    def __init__(self, settings: GradientMergeSettings) -> None:
        self._settings = settings
        self._kept: dict[int, tuple[P, Grad]] = {}
        self._steps = 0
        self._samples = 0

    @property
    def waiting(self) -> int:
        """Number of steps whose gradients wait to be merged."""
        return self._steps

    def take(
        self, pairs: Sequence[tuple[P, Grad]], samples: int
    ) -> tuple[list[tuple[P, Grad]], int] | None:
        """Add the gradients of one step. The caller must not change the arrays afterwards.

        Returns:
            Merged gradients and their number of samples if this was a k-th step, else None.
        """
        for parameter, grad in pairs:
            before = self._kept.get(id(parameter))
            self._kept[id(parameter)] = (
                parameter,
                grad if before is None else summed(before[1], grad),
            )
        self._steps += 1
        self._samples += samples
        current().mergers.add(self)
        return None if self._steps < self._settings.k_steps else self.take_waiting()

    def take_waiting(self) -> tuple[list[tuple[P, Grad]], int]:
        """Remove the collected gradients, and return them merged, with their number of samples."""
        factor = 1 / self._steps if self._settings.avg and self._steps > 1 else 1.0
        merged_pairs = [
            (p, grad if factor == 1 else scaled(grad, factor)) for p, grad in self._kept.values()
        ]
        total = self._samples
        self.drop_waiting()
        return merged_pairs, total

    def drop_waiting(self) -> None:
        """Drop the collected gradients."""
        self._steps = self._samples = 0
        self._kept.clear()
