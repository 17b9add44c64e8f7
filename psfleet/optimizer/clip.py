"""Gradient clipping. Each worker clips its own gradients before it pushes them.

    optimizer = Adam(0.001, grad_clip=ClipGradByGlobalNorm(1.0))

Weight decay is added after clipping. Parameters with `need_clip=False` are not clipped and are not part of
a global norm. In a sparse gradient the rows of repeated ids are summed first, so that the result is the
same as for an equal dense gradient.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.validation.annotations import Positive, checked
from psfleet.core.engine.gradients import SparseGrad, merge_rows
from psfleet.core.graph.parameters.gradient_norms import gathered_squares, scaled_down, squared_norm
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.optimizer.program_access import held_by, parameter_of

Floats = NDArray[np.float32]
Grad = Floats | SparseGrad
Pairs = Sequence[tuple[Parameter, Grad]]


class ClipGradBase:
    """Base of the clips. Pass a clip to an optimizer, or call it with (parameter, gradient) pairs.

    Gradients are arrays, SparseGrad, or program variables. A variable is clipped in each run of its program.
    Pairs without a gradient, (parameter, None), are returned unchanged.
    """

    def __call__(self, params_grads: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Return pairs with clipped gradients, in the same order. The given arrays are not changed."""
        result = [(p, held_by(g)) for p, g in params_grads]
        positions = [i for i, (p, g) in enumerate(result) if g is not None]
        pairs = [result[i] for i in positions]
        symbolic = [hasattr(g, "record") for _, g in pairs]
        if any(symbolic) and not all(symbolic):
            raise UsageError("params_grads mixes arrays and variables; give one kind")
        clips = self._record(pairs) if any(symbolic) else self._clip_pairs(pairs)
        for i, pair in zip(positions, clips, strict=True):
            result[i] = pair
        return result

    def _record(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Add clipping operations to the program; return the pairs with the clipped variables."""
        variables = iter(self._operations([g for p, g in pairs if parameter_of(p).need_clip]))
        return [(p, next(variables) if parameter_of(p).need_clip else g) for p, g in pairs]

    def _operations(self, gradients: list[Any]) -> list[Any]:
        raise NotImplementedError

    def _clip_pairs(self, params_grads: Pairs) -> list[tuple[Parameter, Grad]]:
        pairs = [(p, _merged(g) if p.need_clip else g) for p, g in params_grads]
        values = iter(self._clip([_values(g) for p, g in pairs if p.need_clip]))
        return [(p, _like(g, next(values)) if p.need_clip else g) for p, g in pairs]

    def _clip(self, values: list[Floats]) -> list[Floats]:
        raise NotImplementedError


class ClipGradByValue(ClipGradBase):
    """Clips every element of a gradient to [min, max]. `min` is -max by default."""

    @checked
    def __init__(self, max: float, min: float | None = None) -> None:
        low = -max if min is None else min
        if low > max:
            raise ConfigError(
                f"{type(self).__name__}: min is {low!r} and max is {max!r}, they must be in order"
            )
        self.max = float(max)
        self.min = float(low)

    def _operations(self, gradients: list[Any]) -> list[Any]:
        from psfleet.core.graph.program.ops.arithmetic import BoundGradient
        from psfleet.core.graph.program.variable import apply

        return [apply(BoundGradient(self.min, self.max), g) for g in gradients]

    def _clip(self, values: list[Floats]) -> list[Floats]:
        return [np.clip(v, np.float32(self.min), np.float32(self.max)) for v in values]


class ClipGradByNorm(ClipGradBase):
    """Scales each gradient separately, so that its L2 norm is at most `clip_norm`."""

    @checked
    def __init__(self, clip_norm: Positive) -> None:
        self.clip_norm = float(clip_norm)

    def _operations(self, gradients: list[Any]) -> list[Any]:
        from psfleet.core.graph.program.ops.arithmetic import GradientSquare, ScaleGradient
        from psfleet.core.graph.program.variable import apply

        return [
            apply(ScaleGradient(self.clip_norm), g, apply(GradientSquare(), g)) for g in gradients
        ]

    def _clip(self, values: list[Floats]) -> list[Floats]:
        return [scaled_down(v, self.clip_norm, math.sqrt(squared_norm(v))) for v in values]


class ClipGradByGlobalNorm(ClipGradBase):
    """Scales all gradients by the same factor, so that their common L2 norm is at most `clip_norm`."""

    @checked
    def __init__(
        self, clip_norm: Positive, group_name: str = "default_group", auto_skip_clip: bool = False
    ) -> None:
        self.clip_norm = float(clip_norm)
        self.group_name = group_name
        self.auto_skip_clip = auto_skip_clip

    def _operations(self, gradients: list[Any]) -> list[Any]:
        from psfleet.core.graph.program.ops.arithmetic import GradientSquare, ScaleGradient
        from psfleet.core.graph.program.variable import apply

        squares = [apply(GradientSquare(), g) for g in gradients]
        return [apply(ScaleGradient(self.clip_norm), g, *squares) for g in gradients]

    def _clip_pairs(self, params_grads: Pairs) -> list[tuple[Parameter, Grad]]:
        self._names = [p.name for p, _ in params_grads if p.need_clip]
        return super()._clip_pairs(params_grads)

    def _clip(self, values: list[Floats]) -> list[Floats]:
        squares = gathered_squares(self._names, [squared_norm(v) for v in values])
        norm = math.sqrt(sum(squares))
        return [scaled_down(v, self.clip_norm, norm) for v in values]


GradientClipByValue = ClipGradByValue
GradientClipByNorm = ClipGradByNorm
GradientClipByGlobalNorm = ClipGradByGlobalNorm


@checked
def set_gradient_clip(
    clip: ClipGradBase | None,
    param_list: Sequence[Parameter | str | Any] | None = None,
    program: Any = None,
) -> None:
    """Set the clip of parameters. It is used by optimizers that have no grad_clip of their own.

        set_gradient_clip(ClipGradByGlobalNorm(1.0))

    Parameters with the same clip object are clipped together, by their common global norm.

    Args:
        clip: Clip to apply from now on, or None to stop clipping.
        param_list: Parameters, their variables or names. None means all parameters that the program has now.
        program: Program of the parameters. None means the default main program.

    Raises:
        ConfigError: `clip` is no clip. UsageError: An entry is no parameter of the program.
    """
    from psfleet.core.graph.program.program import default_main_program

    parameters = {p.name: p for p in (program or default_main_program()).all_parameters()}
    targets = (
        list(parameters.values())
        if param_list is None
        else [_named(p, parameters) for p in param_list]
    )
    for parameter in targets:
        parameter.gradient_clip = clip


def clip_by_own(pairs: Pairs) -> list[tuple[Parameter, Grad]]:
    """Clip each gradient with the clip that `set_gradient_clip` has set for its parameter, if any."""
    clips = {id(p.gradient_clip): p.gradient_clip for p, _ in pairs if p.gradient_clip is not None}
    result = list(pairs)
    for clip in clips.values():
        positions = [i for i, (p, _) in enumerate(result) if p.gradient_clip is clip]
        for i, pair in zip(positions, clip([result[i] for i in positions]), strict=True):
            result[i] = pair
    return result


def _named(entry: Any, parameters: dict[str, Parameter]) -> Parameter:
    parameter = parameters.get(entry) if isinstance(entry, str) else parameter_of(entry)
    if not isinstance(parameter, Parameter):
        raise UsageError(
            f"set_gradient_clip: param_list has {entry!r}, which is no parameter of the program; it has "
            f"{', '.join(parameters) or 'none'}"
        )
    return parameter


def _merged(grad: Grad) -> Grad:
    return merge_rows(grad) if isinstance(grad, SparseGrad) else grad


def _values(grad: Grad) -> Floats:
    return grad.rows if isinstance(grad, SparseGrad) else grad


def _like(grad: Grad, values: Floats) -> Grad:
    return grad.with_rows(values) if isinstance(grad, SparseGrad) else values
