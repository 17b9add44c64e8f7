"""Deep gradient compression (Lin et al., 2018): Momentum that sends only the largest elements of gradients.

A worker keeps the elements that it does not send and adds them to its next gradients, so that they are
applied later and not lost. At a sparsity of 99.9 % it sends less than a hundredth of the bytes of dense
gradients.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import (
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    checked,
)
from psfleet.core.engine import rules
from psfleet.core.engine.gradients import Grad, SparseElements, SparseGrad
from psfleet.core.engine.rules.rule import Rule
from psfleet.core.engine.schema.table import DecaySpec
from psfleet.core.graph.parameters import binding
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.parameters.parameter_gradients import densify
from psfleet.optimizer.arguments import as_documented
from psfleet.optimizer.clip import ClipGradBase, ClipGradByNorm
from psfleet.optimizer.optimizer import LegacyArguments, Optimizer, Pairs, Rate
from psfleet.regularizer import WeightDecay

Floats = NDArray[np.float32]
_ELEMENT_BYTES, _VALUE_BYTES = 8, 4
_COMPRESSED = 16384
"""Number of values from which on a parameter is always compressed. Paddle compresses no smaller parameter."""


class DGCMomentum(Optimizer):
    """Momentum that sends only the largest elements of dense gradients, from update `rampup_begin_step` on.

        optimizer = DGCMomentum(0.1, 0.9, rampup_begin_step=1000)

    For each dense parameter with gradient g the worker keeps two arrays:

    - the velocity u = momentum * u + g (momentum correction);
    - the sum that it has not sent yet, v = v + u (error feedback).

    In each step it sends the largest elements of v, at least one, and sets u and v to zero at their
    positions (factor masking). An element takes 8 bytes with its position. If the whole array is smaller,
    the worker sends the array instead. The servers apply plain SGD.

    Before compression begins, the servers apply Momentum. The worker computes u already then, so that
    compression starts from the right velocity. For sparse parameters the servers always apply Momentum.

    The smallest parameters are sent whole, with momentum on the worker. These are parameters with fewer
    than 16,384 values, the smallest first, as long as together they take no more bytes than compression
    would send for all parameters. (Paddle has only the limit of 16,384, which would leave a small model
    uncompressed.)

    The worker adds weight decay to its gradient after clipping and before momentum correction, as in
    Paddle. The servers average over the workers, so a step decays the weights once for any number of
    workers.

    Args:
        rampup_begin_step: Number of updates before compression begins. (The worker counts its own updates.
            Each table counts its updates too, and changes from Momentum to SGD.)
        rampup_step: Number of updates over which `sparsity` rises. Each entry of `sparsity` is used for an
            equal number of these updates.
        sparsity: Fractions of the elements that are not sent, in [0, 1). The last entry is used from then on.
        local_grad_clip_norm: Limit of the norm of each gradient, or None for no limit. In compressed steps
            the gradient is clipped to local_grad_clip_norm / sqrt(num_trainers), before weight decay is
            added.
        num_trainers: Number of workers in this formula. None means the fleet's number.
    """

    works_on_worker = True

    @as_documented()
    def __init__(
        self,
        learning_rate: Rate,
        momentum: float,
        rampup_begin_step: NonNegativeInt,
        rampup_step: PositiveInt = 1,
        sparsity: Sequence[float] = (0.999,),
        use_nesterov: bool = False,
        local_grad_clip_norm: NonNegative | None = None,
        num_trainers: PositiveInt | None = None,
        weight_decay: WeightDecay | float | None = None,
        name: str | None = None,
        parameters: Iterable[Any] | None = None,
        grad_clip: ClipGradBase | None = None,
        **older: Unpack[LegacyArguments],
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name, **older)
        if not sparsity or not all(0 <= share < 1 for share in sparsity):
            raise ConfigError(
                f"DGCMomentum: sparsity is {sparsity!r}, it must be a list of numbers in [0, 1)"
            )
        self._rule = rules.DGCMomentum(momentum, rampup_begin_step, use_nesterov)
        self._plain = rules.Momentum(momentum, use_nesterov)
        self._begin, self._length = rampup_begin_step, rampup_step
        self._sparsity = tuple(sparsity)
        self._momentum, self._nesterov = np.float32(momentum), use_nesterov
        self._clip_norm = local_grad_clip_norm and ClipGradByNorm(local_grad_clip_norm).clip_norm
        self._trainers = num_trainers
        self._velocity: dict[str, Floats] = {}
        self._unsent: dict[str, Floats] = {}
        self._whole: set[str] = set()

    def rule(self, parameter: Parameter | None = None) -> Rule:
        """Return the update rule for a parameter. Sparse parameters have Momentum, also after compression
        begins."""
        return self._plain if parameter is not None and parameter.sparse else self._rule

    def lend(self, lender: Optimizer, parameters: Iterable[Any]) -> None:
        """Refuse parameter groups, because all arrays on the worker have the same momentum.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("DGCMomentum: parameters has groups; give it one list of parameters")

    def sparsity(self) -> float:
        """Return the fraction of elements that this update does not send, or 0 before compression begins."""
        past = self._updates - self._begin
        if past < 0:
            return 0.0
        return self._sparsity[
            min(past * len(self._sparsity) // self._length, len(self._sparsity) - 1)
        ]

    def _update(self, pairs: Pairs, samples: int, loss: float | None) -> None:
        """Choose the parameters to send whole, then update.

        In a pipeline the parameters of all stages are considered, not only those of this stage.
        """
        parameters = self._planned or [parameter for parameter, _ in pairs]
        dense = [p for p in parameters if p.trainable and not p.sparse]
        self._whole = _small({p.name: math.prod(p.shape) for p in dense}, self.sparsity())
        super()._update(pairs, samples, loss)

    def decay(self, parameter: Parameter | None = None) -> DecaySpec:
        """Return the weight decay that the servers apply. For dense parameters none, because the worker
        does."""
        if parameter is not None and not parameter.sparse:
            return DecaySpec()
        return super().decay(parameter)

    def _sent(self, parameter: Parameter, grad: Grad) -> Grad | SparseElements:
        if parameter.sparse:
            return grad
        if isinstance(grad, SparseGrad):
            grad = densify(parameter, grad)
        compresses = self._updates >= self._begin
        grad = self._decayed(parameter, self._clipped(grad) if compresses else grad)
        velocity = self._correct(parameter.name, grad)
        if not compresses:
            return grad
        return self._compressed(parameter.name, velocity + grad if self._nesterov else velocity)

    def _decayed(self, parameter: Parameter, grad: Floats) -> Floats:
        regularizer = self._regularizer(parameter)
        if regularizer is None:
            return grad
        return grad + regularizer.gradient(binding.tables().value(parameter))

    def _correct(self, name: str, grad: Floats) -> Floats:
        """Add a gradient to the parameter's velocity u, and return the new velocity (momentum correction)."""
        before = self._before(name)
        velocity = self._momentum * (before + grad if self._nesterov else before)
        self._velocity[name] = velocity if self._nesterov else velocity + grad
        return self._velocity[name]

    def _before(self, name: str) -> Floats:
        """Return the velocity before this update. It is zero if this step sends all elements, because factor
        masking sets the velocity of sent elements to zero.
        """
        if self._updates >= self._begin and self.sparsity() == 0 and name not in self._whole:
            return np.zeros((), np.float32)
        if name in self._velocity:
            return self._velocity[name]
        # A state saved before compression has only the servers' velocity. With Nesterov momentum, u is one
        # momentum step ahead of the servers' velocity.
        velocity = np.asarray(self._waiting.get(f"{name}.velocity", 0), np.float32)
        return self._momentum * velocity if self._nesterov else velocity

    def _clipped(self, grad: Floats) -> Floats:
        if not self._clip_norm:
            return grad
        workers = self._trainers or binding.tables().runtime.worker_num
        norm = float(np.sqrt(np.sum(np.square(grad, dtype=np.float64))))
        limit = self._clip_norm / workers**0.5
        return grad * np.float32(limit / norm) if norm > limit else grad

    def _compressed(self, name: str, direction: Floats) -> Floats | SparseElements:
        """Add the direction to the unsent sum v, remove its largest elements, and return them to be sent."""
        unsent = self._unsent.get(name, np.float32(0)) + direction
        if name in self._whole:
            self._unsent[name] = np.zeros_like(unsent)
            return unsent
        large = _largest(unsent, self.sparsity())
        self._velocity[name] = np.where(large, np.float32(0), self._velocity[name])
        self._unsent[name] = np.where(large, np.float32(0), unsent)
        positions = np.flatnonzero(large)
        if _ELEMENT_BYTES * len(positions) < _VALUE_BYTES * unsent.size:
            return SparseElements(positions, unsent.reshape(-1)[positions])
        return np.where(large, unsent, np.float32(0))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as Optimizer does and, once compression has begun, this worker's arrays u and v
        of each parameter as `name.dgc_u` and `name.dgc_v`.
        """
        state = super().state_dict()
        if self._updates <= self._begin:  # the servers' velocity is the mean of all workers' u
            return state
        state.update({f"{name}.dgc_u": values.copy() for name, values in self._velocity.items()})
        state.update({f"{name}.dgc_v": values.copy() for name, values in self._unsent.items()})
        return state

    @checked
    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state made by `state_dict()`, including u and v if the state has them."""
        super().set_state_dict(state_dict)
        for ending, arrays in ((".dgc_u", self._velocity), (".dgc_v", self._unsent)):
            arrays.clear()
            arrays.update(
                {
                    key.removesuffix(ending): np.array(values, np.float32)
                    for key, values in state_dict.items()
                    if key.endswith(ending)
                }
            )


def _largest(values: Floats, sparsity: float) -> NDArray[np.bool_]:
    """Return a mask of the elements with the largest magnitude: the fraction 1 - sparsity, at least one."""
    count = min(max(1, round(values.size * (1 - sparsity))), values.size)
    if count == values.size:
        return np.ones(values.shape, np.bool_)
    sizes = np.abs(values).reshape(-1)
    sizes[np.isnan(sizes)] = np.inf  # send NaN, so that checks find it
    border = np.partition(sizes, values.size - count)[values.size - count]
    mask = sizes > border
    mask[np.flatnonzero(sizes == border)[: count - int(mask.sum())]] = (
        True  # of equal elements the first
    )
    result: NDArray[np.bool_] = mask.reshape(values.shape)
    return result


def _small(sizes: Mapping[str, int], sparsity: float) -> set[str]:
    """Return the names of the parameters to send whole: the smallest parameters that together take no more
    bytes than compression would send for all parameters.
    """
    names: set[str] = set()
    # Number of float32 values that take as many bytes as all elements that compression would send.
    free_values = _ELEMENT_BYTES / _VALUE_BYTES * (1 - sparsity) * sum(sizes.values())
    for name, size in sorted(sizes.items(), key=lambda pair: (pair[1], pair[0])):
        free_values -= size
        if free_values < 0 or size >= _COMPRESSED or len(names) == len(sizes) - 1:
            break
        names.add(name)
    return names
