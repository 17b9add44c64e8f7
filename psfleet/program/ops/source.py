"""Operations without inputs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from psfleet.program.operation import Array, Context, Op, Spec


@dataclass(frozen=True)
class FillConstant(Op, saved="fill shape dtype value"):
    """An array of one value."""

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    value: float = 0.0
    differentiable = False

    def infer(self) -> Spec:
        return self.shape, np.dtype(self.dtype)

    def forward(self, context: Context) -> Array:
        return np.full(self.shape, self.value, self.dtype)


@dataclass(frozen=True)
class StepCounter(Op, saved="step_counter"):
    """The number of training runs of the program so far, this one included, int64 [1]."""

    differentiable = False

    def infer(self) -> Spec:
        return (1,), np.dtype(np.int64)

    def forward(self, context: Context) -> Array:
        return np.array([context.program.step + 1], np.int64)


@dataclass(frozen=True)
class PerRun(Op):
    """A function of the number of training runs before this one, float32 [1]."""

    value: Callable[[int], float] = float
    differentiable = False

    def infer(self) -> Spec:
        return (1,), np.dtype(np.float32)

    def forward(self, context: Context) -> Array:
        return np.array([self.value(context.program.step)], np.float32)
