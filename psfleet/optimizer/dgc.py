"""Deep gradient compression (Lin et al., 2018): Momentum that sends only the largest gradients.

A worker keeps what it does not send and adds it to its next gradients, so that nothing is lost, only late.
At a sparsity of 99.9 % this sends less than a hundredth of the bytes of dense gradients.
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
"""Size in values from which a parameter is always compressed. Paddle compresses no smaller
parameter."""


class DGCMomentum(Optimizer):
    """Momentum whose gradients are compressed on the worker from update `rampup_begin_step` on.

    For each dense parameter the worker keeps two arrays:

    - the velocity u = momentum * u + g (momentum correction);
    - what it has not sent yet, v = v + u (error feedback).

    It sends the largest elements of v, at least one, and sets u and v to zero there (factor masking).
    Elements travel with their positions, 8 bytes each, unless the whole array is smaller. The servers apply
    plain SGD to them. Before compression begins the servers apply Momentum; the worker computes u of its
    own gradients already then, so that compression starts from it. Sparse parameters always have Momentum
    on the servers.

    The smallest parameters are sent whole, but keep their momentum on the worker too. A parameter is small
    if it has fewer than 16,384 values and all small ones together take no more bytes than the compressed
    elements of the others. (Paddle only has the limit of 16,384, which would leave a small model
    uncompressed.)

    The worker adds weight decay to its gradient after clipping and before momentum correction, as Paddle's
    operator does. The servers take the mean over the workers, so a step decays the weights once for any
    number of workers.

    Args:
        rampup_begin_step: Number of updates before compression begins. The worker counts its own; the
            tables count theirs, to change their rule.
        rampup_step: Number of updates over which the entries of `sparsity` are used, each for an equal part.
        sparsity: Fractions of the elements that are not sent, in [0, 1). The last one stays.
        local_grad_clip_norm: Each gradient is clipped to this norm over the square root of `num_trainers`
            before it is accumulated. Applies only to compressed steps, and before weight decay is added.
        num_trainers: Number of workers for that formula. None means the fleet's.
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
        """The update rule for a parameter."""
        return self._plain if parameter is not None and parameter.sparse else self._rule

    def lend(self, lender: Optimizer, parameters: Iterable[Any]) -> None:
        """Refuse parameter groups, because the arrays on the worker have one momentum.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("DGCMomentum: parameters has groups; give it one list of parameters")

    def sparsity(self) -> float:
        """Return the fraction of the elements that this update does not send; 0 before compression begins."""
        past = self._updates - self._begin
        if past < 0:
            return 0.0
        return self._sparsity[
            min(past * len(self._sparsity) // self._length, len(self._sparsity) - 1)
        ]

    def _update(self, pairs: Pairs, samples: int, loss: float | None) -> None:
        """Choose the parameters to send whole, then update. In a pipeline the choice counts all stages'
        parameters."""
        parameters = self._planned or [parameter for parameter, _ in pairs]
        dense = [p for p in parameters if p.trainable and not p.sparse]
        self._whole = _small({p.name: math.prod(p.shape) for p in dense}, self.sparsity())
        super()._update(pairs, samples, loss)

    def decay(self, parameter: Parameter | None = None) -> DecaySpec:
        """Return the regularization that the servers add, which is none for dense parameters: the worker
        adds it."""
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
        """Add a gradient to the parameter's velocity u and return it (momentum correction)."""
        before = self._before(name)
        velocity = self._momentum * (before + grad if self._nesterov else before)
        self._velocity[name] = velocity if self._nesterov else velocity + grad
        return self._velocity[name]

    def _before(self, name: str) -> Floats:
        """Return the velocity before this update; zero if the step sends everything, which masks all of
        it."""
        if self._updates >= self._begin and self.sparsity() == 0 and name not in self._whole:
            return np.zeros((), np.float32)
        if name in self._velocity:
            return self._velocity[name]
        # A state saved before compression has only the servers' velocity. Under Nesterov u is one momentum
        # step ahead of that.
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
        """Add the direction to what is unsent; return the largest elements to send, and keep the others."""
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
        """Return Optimizer's state and, once compression has begun, this worker's `name.dgc_u` and
        `name.dgc_v`."""
        state = super().state_dict()
        if self._updates <= self._begin:  # the servers' velocity is the mean of all workers' u
            return state
        state.update({f"{name}.dgc_u": values.copy() for name, values in self._velocity.items()})
        state.update({f"{name}.dgc_v": values.copy() for name, values in self._unsent.items()})
        return state

    @checked
    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state, with this worker's u and v if it has them."""
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
    """Return a mask of the largest magnitudes: (1 - sparsity) of all elements, at least one."""
    count = min(max(1, round(values.size * (1 - sparsity))), values.size)
    if count == values.size:
        return np.ones(values.shape, np.bool_)
    sizes = np.abs(values).reshape(-1)
    sizes[np.isnan(sizes)] = (
        np.inf
    )  # send a NaN, so that checks see it; kept, it would hide for ever
    border = np.partition(sizes, values.size - count)[values.size - count]
    mask = sizes > border
    mask[np.flatnonzero(sizes == border)[: count - int(mask.sum())]] = (
        True  # the first of equal ones
    )
    result: NDArray[np.bool_] = mask.reshape(values.shape)
    return result


def _small(sizes: Mapping[str, int], sparsity: float) -> set[str]:
    """Return the names of the parameters to send whole: the smallest ones, within the bytes of the
    compressed elements."""
    names: set[str] = set()
    # As many values as take the bytes of all elements that compression would send.
    free_values = _ELEMENT_BYTES / _VALUE_BYTES * (1 - sparsity) * sum(sizes.values())
    for name, size in sorted(sizes.items(), key=lambda pair: (pair[1], pair[0])):
        free_values -= size
        if free_values < 0 or size >= _COMPRESSED or len(names) == len(sizes) - 1:
            break
        names.add(name)
    return names
