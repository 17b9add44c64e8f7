"""Training step of one pipeline stage of a torch model: micro-batches forward, gradients back, losses shared.

Every stage process runs a PipelineStep for each batch. The schedule (psfleet.core.runtime.stages) says in
which order micro-batches go forward and back:

    stage 0   inputs -> modules -- activations --> stage 1 -> modules -- ... --> last stage -> loss
              leaf gradients   <-- gradients ---   stage 1            <-- ... --

Results must be bit-identical wherever the model is cut. So random numbers are seeded by module and
micro-batch (StepSeeds), and tensors between modules are made contiguous even where no message is sent
(`_smooth`). At the end of a step all stages exchange losses and buffers, such as running statistics. Each
stage then has the current buffers and returns the loss of the whole batch.
"""

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

_PLAIN = {torch.bfloat16: torch.int16}  # NumPy has no bfloat16, so its bits are sent as int16
_KINDS = {str(kind): kind for kind in _PLAIN}


Loss = Callable[[Any, Any], Tensor]


def tensors_of(value: Any, maker: str) -> list[Tensor]:
    """Return a module's output, which is a tensor or a tuple of tensors, as a list.

    Args:
        value: The output.
        maker: Description of the module, for the error message.

    Raises:
        UsageError: The output is no tensor and no tuple of tensors, so it cannot be sent to another stage.
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
    """Convert tensors to the arrays of a message: first a JSON header as bytes, then one array for each
    tensor.

    The header is a list with one entry for each tensor: null for None, or else [dtype, requires_grad]. Here
    dtype is empty unless it is one that NumPy lacks. Arrays share the memory of contiguous CPU tensors.
    """
    header = [
        None if t is None else [str(t.dtype) if t.dtype in _PLAIN else "", t.requires_grad]
        for t in tensors
    ]
    arrays = [_plain(t.detach()).cpu().numpy() for t in tensors if t is not None]
    return [np.frombuffer(json.dumps(header).encode(), np.uint8), *arrays]


def from_arrays(arrays: Sequence[Array]) -> list[Tensor | None]:
    """Convert the arrays of a message back to tensors. They are copies, and require gradients if the
    sender's did.
    """
    header, values = json.loads(arrays[0].tobytes()), iter(arrays[1:])
    return [None if about is None else _tensor(next(values), *about) for about in header]


def _plain(tensor: Tensor) -> Tensor:
    kind = _PLAIN.get(tensor.dtype)
    return tensor if kind is None else tensor.view(kind)


def _tensor(array: Array, kind: str, needs_gradient: bool) -> Tensor:
    tensor = torch.tensor(array)  # copies: a message's memory is not aligned for torch's kernels
    return (tensor.view(_KINDS[kind]) if kind else tensor).requires_grad_(needs_gradient)


def samples_of(batch: Any) -> int:
    """Return the number of samples of a batch, which is the length of all its tensors except
    zero-dimensional ones.

    Raises:
        ShapeError: The lengths differ, or the batch has no tensor.
    """
    lengths = sorted({len(tensor) for tensor in _tensors(batch)})
    if len(lengths) != 1:
        raise ShapeError(
            f"the tensors of a batch have the lengths {lengths}; a pipeline cuts all of them into "
            "the same micro-batches, so they must have one"
        )
    return lengths[0]


def micro_batch(batch: Any, start: int, end: int) -> Any:
    """Return the part of a batch with samples `start` to `end` - 1.

    Tensors may be nested in tuples, lists and dicts to any depth. Values that are no tensors are kept.
    """
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
    """Modules of the pipeline stage that this process runs, and the buffers of all stages.

    Args:
        model: The whole model, which every process has.
        places: For each stage, the indices in the model of its modules.
        recomputes: True to drop activations and compute them again in the backward pass.
        queue_size: Number of messages that may wait between two stages.

    Attributes:
        places: Indices in the model of this stage's modules.
        own: Modules of this stage.
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
        """Compute the output of this stage's modules for the micro-batch number `micro`."""
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
                preserve_rng_state=False,  # `seeds` give the second pass the same random numbers
            )
        return value

    def _through(self, indices: range, value: Any, micro: int, seeds: "StepSeeds") -> Any:
        for index in indices:
            with seeds.of(micro, index):
                value = _smooth(self._model[index](value), index)
        return value

    def changed(self) -> list[tuple[int, Tensor]]:
        """Return the buffers of this stage that have changed since the last call, each with its number.

        Buffers are numbered through the whole model, so a number means the same buffer in every process.
        """
        buffers = []
        for number, (stage, holder) in enumerate(self._buffers):
            if stage != here().stage:
                continue
            # Compare values: not every torch kernel raises the tensor's change counter (`_version`).
            buffer, before = holder(), self._told.get(number)
            if before is None or not torch.equal(buffer, before):
                self._told[number] = buffer.clone()
                buffers.append((number, self._told[number]))
        return buffers

    @torch.no_grad()
    def set_buffer(self, number: int, value: Tensor) -> None:
        """Copy the value of another stage's buffer into this process's model."""
        self._buffers[number][1]().copy_(value)


class StepSeeds:
    """Seeds for the random numbers of one step, with a different seed for each module and micro-batch.

    With them a dropout mask does not depend on the stage that runs a module, nor on the order of
    micro-batches. After each module the generator's state is restored, so that the script's own random
    numbers are the same.
    """

    def __init__(self, seed: int, worker: int, step: int) -> None:
        self._begin = f"{seed}/{worker}/{step}"

    def of(self, micro: int, place: int) -> "_SeededRandom":
        """Return a context manager under which module number `place` computes micro-batch number `micro`."""
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
    """Yield a getter for each buffer of a module, because a forward pass may assign a new tensor to
    a buffer.
    """
    for part in module.modules():
        for key, buffer in part._buffers.items():
            if buffer is not None:
                yield partial(part._buffers.__getitem__, key)


def _smooth(value: Any, index: int) -> Any:
    """Make a module's output and its gradient contiguous, as if they had been sent to another stage.

    Torch's kernels may round differently in another memory layout. So the layout must not depend on whether
    the model is cut after this module.
    """
    tensors = [contiguous(tensor) for tensor in tensors_of(value, f"module {index}")]
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(contiguous)
    return tuple(tensors) if isinstance(value, tuple) else tensors[0]


def contiguous(tensor: Any) -> Any:
    """Return the tensor in contiguous memory. None gives None."""
    return None if tensor is None else tensor.contiguous()


class PipelineStep(PipelineEngine[Sequence[Tensor | None]]):
    """Computes one stage's part of the training step for one batch.

    Args:
        kind: Order of forward and backward passes.
        inputs: Inputs of the whole batch, used by the first stage.
        targets: Targets of the whole batch, used by the last stage.
        loss: Function from outputs and targets of a micro-batch to its mean loss.
    """

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
        position = here()
        links = ways.links(parts.queue_size) if position.processes > 1 else None
        super().__init__(kind, sizes, position, links, ways.next_step())
        self._parts = parts
        self._inputs = inputs
        self._targets = targets
        self._loss = loss
        self._seeds = seeds
        # For each micro-batch between its forward and backward pass: tensors received from the stage
        # before, and outputs of this stage.
        self._runs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._losses: dict[int, float] = {}

    def complete(self) -> float:
        """Run the step and return the loss of the whole batch, the same number in every stage."""
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
            # Torch forbids in-place changes of a leaf that requires gradients. A clone is no leaf, so a
            # module may change it in place, and its gradient still flows to the leaf.
            copies = tuple(leaf.clone() for leaf in leaves)
            value = copies if message[0] is None else copies[0]
        value = self._parts.forward(value, micro, self._seeds)
        if self._is_last:
            out = [self._loss_of(value, micro)]
        else:
            out = tensors_of(value, f"module {self._parts.places[-1]}")
            # A leading None tells the next stage that the module returned a tuple.
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
        """Exchange losses and changed buffers with the other stages."""
        if self._links is None:
            return
        changed_buffers = self._parts.changed()
        numbers = torch.tensor([number for number, _ in changed_buffers])
        losses = torch.tensor(list(self._losses.items()), dtype=torch.float64)
        outgoing = to_arrays([losses, numbers, *(buffer for _, buffer in changed_buffers)])
        for message in self._exchange("end", range(self._place.processes), outgoing):
            pairs, order, *buffers = _all(from_arrays(message))
            self._losses |= {int(micro): loss for micro, loss in pairs.tolist()}
            for number, buffer in zip(order.tolist(), buffers, strict=True):
                self._parts.set_buffer(int(number), buffer)


def _all(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
