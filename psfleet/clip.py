"""Gradient clipping: on the worker, per worker, before the push and before regularization."""

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
