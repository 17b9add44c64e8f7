"""Gradient clipping. Each worker clips its own gradients before it pushes them.

    from psfleet.clip import ClipGradByGlobalNorm
    from psfleet.optimizer import Adam

    optimizer = Adam(0.001, grad_clip=ClipGradByGlobalNorm(1.0))

Weight decay is added after clipping. psfleet/optimizer/clip.py has the code.
"""

from psfleet.optimizer.clip import (
    ClipGradBase,
    ClipGradByGlobalNorm,
    ClipGradByNorm,
    ClipGradByValue,
    GradientClipByGlobalNorm,
    GradientClipByNorm,
    GradientClipByValue,
    clip_by_own,
    set_gradient_clip,
)

__all__ = [
    "ClipGradBase",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "GradientClipByGlobalNorm",
    "GradientClipByNorm",
    "GradientClipByValue",
    "clip_by_own",
    "set_gradient_clip",
]
