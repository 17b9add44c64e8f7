"""One step of a pipeline, as one stage takes it: messages, micro-batches through its modules, and back."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.base.settings.kinds import Schedule
from psfleet.core.graph.program.operation import Array
from psfleet.core.runtime import stages as ways
from psfleet.core.runtime.stages import PipelineEngine, here
from psfleet.torch.strategy_support import grouped

_PLAIN = {torch.bfloat16: torch.int16}  # what NumPy has no name for travels as
_KINDS = {str(kind): kind for kind in _PLAIN}


Loss = Callable[[Any, Any], Tensor]


def tensors_of(value: Any, maker: str) -> list[Tensor]:
    """The tensors of what a module gives: a tensor, or a tuple of them.

    Raises:
        UsageError: It is something else.
    """
    parts = list(value) if isinstance(value, tuple) else [value]
    for part in parts:
        if not isinstance(part, Tensor):
            raise UsageError(
                f"{maker} gives a {type(part).__name__}; what goes from one stage to the next must "
                "be a tensor or a tuple of tensors"
            )
    return parts


def to_arrays(tensors: Sequence[Tensor | None]) -> list[Array]:
    """Contiguous tensors, some of which may be missing, as arrays that share their memory."""
    header = [
        None if t is None else [str(t.dtype) if t.dtype in _PLAIN else "", t.requires_grad]
        for t in tensors
    ]
    arrays = [_plain(t.detach()).cpu().numpy() for t in tensors if t is not None]
    return [np.frombuffer(json.dumps(header).encode(), np.uint8), *arrays]


def from_arrays(arrays: Sequence[Array]) -> list[Tensor | None]:
    """Return the sent values, in memory of their own; they require gradients where the sender's did."""
    header, values = json.loads(arrays[0].tobytes()), iter(arrays[1:])
    return [None if about is None else _tensor(next(values), *about) for about in header]


def _plain(tensor: Tensor) -> Tensor:
    kind = _PLAIN.get(tensor.dtype)
    return tensor if kind is None else tensor.view(kind)


def _tensor(array: Array, kind: str, needs_gradient: bool) -> Tensor:
    tensor = torch.tensor(array)  # in memory that is aligned as torch's kernels like it
    return (tensor.view(_KINDS[kind]) if kind else tensor).requires_grad_(needs_gradient)


def samples_of(batch: Any) -> int:
    """Return the number of samples of a batch: the length of every tensor in it but for single numbers.

    Raises:
        ShapeError: They differ, or there is none.
    """
    lengths = sorted({len(tensor) for tensor in _tensors(batch)})
    if len(lengths) != 1:
        raise ShapeError(
            f"the tensors of a batch have the lengths {lengths}; a pipeline cuts all of them into "
            "the same micro-batches, so they must have one"
        )
    return lengths[0]


def micro_batch(batch: Any, start: int, end: int) -> Any:
    """The samples from start to end of every tensor, at any depth of tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        return batch[start:end] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: micro_batch(part, start, end) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(micro_batch(part, start, end) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(micro_batch(part, start, end) for part in batch)
    return batch


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch] if batch.dim() else []
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, Mapping | list | tuple):
        return [tensor for part in parts for tensor in _tensors(part)]
    return []


class StageModules:
    """The model's modules by stage, and those that this stage trains.

    Args:
        places: Places of each stage's modules in the model.
    """

    def __init__(
        self, model: nn.Sequential, places: Sequence[range], recomputes: bool, queue_size: int
    ) -> None:
        self.places = places[here().stage]
        self.queue_size = queue_size
        self._model = model
        self._recomputes = recomputes
        self.own = [model[i] for i in self.places]
        self._buffers = [
            (stage, buffer)
            for stage, span in enumerate(places)
            for i in span
            for buffer in _buffers(model[i])
        ]
        self._told: dict[int, Tensor] = {}
        self.changed()

    def forward(self, value: Any, micro: int, seeds: "StepSeeds") -> Any:
        """Return the output of this stage's modules for a micro-batch."""
        if not (self._recomputes and torch.is_grad_enabled()):
            return self._through(self.places, value, micro, seeds)
        for span in grouped(len(self.places)):
            part = self.places[span.start : span.stop]
            value = checkpoint(
                self._through,
                part,
                value,
                micro,
                seeds,
                use_reentrant=False,
                preserve_rng_state=False,  # the seeds do it
            )
        return value

    def _through(self, places: range, value: Any, micro: int, seeds: "StepSeeds") -> Any:
        for place in places:
            with seeds.of(micro, place):
                value = _smooth(self._model[place](value), place)
        return value

    def changed(self) -> list[tuple[int, Tensor]]:
        """Buffers of this stage that have changed since the last call, with their numbers."""
        buffers = []
        for number, (stage, holder) in enumerate(self._buffers):
            if stage != here().stage:
                continue
            # By value: not every kernel of torch counts its changes in the tensor's version.
            buffer, before = holder(), self._told.get(number)
            if before is None or not torch.equal(buffer, before):
                self._told[number] = buffer.clone()
                buffers.append((number, self._told[number]))
        return buffers

    @torch.no_grad()
    def set_buffer(self, number: int, value: Tensor) -> None:
        """Take over a buffer of another stage."""
        self._buffers[number][1]().copy_(value)


class StepSeeds:
    """Seeds of one step's random numbers: of each module and micro-batch its own, in any stage.

    Random numbers that the script draws itself are what they were.
    """

    def __init__(self, seed: int, worker: int, step: int) -> None:
        self._begin = f"{seed}/{worker}/{step}"

    def of(self, micro: int, place: int) -> "_SeededRandom":
        """A context in which a module computes."""
        text = f"{self._begin}/{micro}/{place}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return _SeededRandom(int.from_bytes(digest, "little") >> 1)


class _SeededRandom:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self._seed)

    def __exit__(self, *error: object) -> None:
        torch.default_generator.set_state(self._before)


def _buffers(module: nn.Module) -> Iterator[Callable[[], Any]]:
    """Yield a getter of each buffer, which its module may replace."""
    for part in module.modules():
        for key, buffer in part._buffers.items():
            if buffer is not None:
                yield partial(part._buffers.__getitem__, key)


def _smooth(value: Any, place: int) -> Any:
    """Lay out a module's output as if it and its gradient were sent, so that bits do not depend on cuts."""
    tensors = [contiguous(tensor) for tensor in tensors_of(value, f"module {place}")]
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(contiguous)
    return tuple(tensors) if isinstance(value, tuple) else tensors[0]


def contiguous(tensor: Any) -> Any:
    """The tensor with its values side by side; None is None."""
    return None if tensor is None else tensor.contiguous()


class PipelineStep(PipelineEngine[Sequence[Tensor | None]]):
    """One step of this stage."""

    _pack = staticmethod(to_arrays)
    _unpack = staticmethod(from_arrays)

    def __init__(
        self,
        parts: StageModules,
        kind: Schedule,
        sizes: Sequence[int],
        inputs: Any,
        targets: Any,
        loss: Loss,
        seeds: StepSeeds,
    ) -> None:
        place = here()
        links = ways.links(parts.queue_size) if place.processes > 1 else None
        super().__init__(kind, sizes, place, links, ways.next_step())
        self._parts = parts
        self._inputs = inputs
        self._targets = targets
        self._loss = loss
        self._seeds = seeds
        # By micro-batch: the leaves that came in and what went out.
        self._runs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._losses: dict[int, float] = {}

    def complete(self) -> float:
        """Forward and back through this stage's modules; the loss of the whole batch."""
        self._take_actions()
        self._share()
        return sum(self._fractions[micro] * loss for micro, loss in sorted(self._losses.items()))

    def _of_micro(self, batch: Any, micro: int) -> Any:
        start = sum(self._sizes[:micro])
        return micro_batch(batch, start, start + self._sizes[micro])

    @property
    def _is_last(self) -> bool:
        return self._place.stage + 1 == self._place.stages

    def _forward(self, micro: int) -> None:
        leaves: list[Tensor] = []
        stage, value = self._place.stage, self._of_micro(self._inputs, micro)
        if stage:
            message = self._receive("forward", stage - 1, micro)
            leaves = _all(message)
            # Copies are no leaves, so that a module may change its input in place.
            copies = tuple(leaf.clone() for leaf in leaves)
            value = copies if message[0] is None else copies[0]
        value = self._parts.forward(value, micro, self._seeds)
        if self._is_last:
            out = [self._loss_of(value, micro)]
        else:
            out = tensors_of(value, f"module {self._parts.places[-1]}")
            # A tuple differs from a tensor by an empty place in front.
            self._send("forward", stage + 1, micro, [None, *out] if type(value) is tuple else out)
        self._runs[micro] = leaves, out

    def _loss_of(self, value: Any, micro: int) -> Tensor:
        loss = self._loss(value, self._of_micro(self._targets, micro))
        if loss.dim():
            raise ShapeError(
                f"the loss has the shape {tuple(loss.shape)}; it must be a single number, the mean "
                "over the samples"
            )
        self._losses[micro] = float(loss.detach())
        share = self._fractions[micro]
        return loss if share == 1 else loss * share

    def _backward(self, micro: int) -> None:
        stage, (leaves, out) = self._place.stage, self._runs.pop(micro)
        grads: Sequence[Tensor | None] = [None] * len(out)
        if not self._is_last:
            grads = self._receive("back", stage + 1, micro)
            pairs = [(t, grad) for t, grad in zip(out, grads, strict=True) if grad is not None]
            out, grads = [t for t, _ in pairs], [grad for _, grad in pairs]
        if out:
            torch.autograd.backward(out, grads)
        if stage:
            self._send("back", stage - 1, micro, [contiguous(leaf.grad) for leaf in leaves])

    def _share(self) -> None:
        """Tell the other stages the losses and the buffers that have changed; take in theirs."""
        if self._links is None:
            return
        own = self._parts.changed()
        numbers = torch.tensor([number for number, _ in own])
        losses = torch.tensor(list(self._losses.items()), dtype=torch.float64)
        mine = to_arrays([losses, numbers, *(buffer for _, buffer in own)])
        for message in self._exchange("end", range(self._place.processes), mine):
            pairs, order, *buffers = _all(from_arrays(message))
            self._losses |= {int(micro): loss for micro, loss in pairs.tolist()}
            for number, buffer in zip(order.tolist(), buffers, strict=True):
                self._parts.set_buffer(int(number), buffer)


def _all(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
