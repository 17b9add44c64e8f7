"""One step of a pipeline, as one stage takes it: micro-batches through its chunks, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from psfleet.errors import ShapeError
from psfleet.stages import links as ways
from psfleet.stages.links import here
from psfleet.stages.pipeline_engine import PipelineEngine
from psfleet.stages.schedule import Action, Schedule
from psfleet.torch.sequential_chunks import StageModules, StepSeeds, contiguous
from psfleet.torch.stage_messages import detached, from_arrays, micro_batch, tensors_of, to_arrays

__all__ = ["Loss", "PipelineStep"]

Loss = Callable[[Any, Any], Tensor]


class PipelineStep(PipelineEngine[Sequence[Tensor | None]]):
    """One step of this stage."""

    _settled = staticmethod(detached)
    _pack = staticmethod(to_arrays)
    _unpack = staticmethod(from_arrays)

    def __init__(
        self,
        pieces: StageModules,
        schedule: Schedule,
        sizes: Sequence[int],
        inputs: Any,
        targets: Any,
        loss: Loss,
        seeds: StepSeeds,
    ) -> None:
        place = here()
        links = ways.links(pieces.queue_size) if place.processes > 1 else None
        super().__init__(schedule, sizes, place, links, ways.next_step())
        self._pieces = pieces
        self._inputs = inputs
        self._targets = targets
        self._loss = loss
        self._seeds = seeds
        # By chunk and micro-batch: the leaves that came in and what went out.
        self._runs: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._losses: dict[int, float] = {}

    def complete(self) -> float:
        """Forward and back through this stage's chunks; the loss of the whole batch."""
        self._take_actions()
        self._share()
        return sum(self._shares[micro] * loss for micro, loss in sorted(self._losses.items()))

    def _of_micro(self, batch: Any, micro: int) -> Any:
        start = sum(self._sizes[:micro])
        return micro_batch(batch, start, start + self._sizes[micro])

    # -- one action ----------------------------------------------------------------------------

    def _forward(self, chunk: int, micro: int) -> None:
        leaves: list[Tensor] = []
        value = self._of_micro(self._inputs, micro)
        if chunk:
            letter = self._take("forward", chunk, micro, chunk - 1)
            leaves = _all(letter)
            # Copies are no leaves, so that a module may change its input in place.
            copies = tuple(leaf.clone() for leaf in leaves)
            value = copies if letter[0] is None else copies[0]
        value = self._pieces.forward(chunk, value, micro, self._seeds)
        if chunk + 1 == self._schedule.chunks:
            out = [self._loss_of(value, micro)]
        else:
            out = tensors_of(value, f"module {self._pieces.chunks[chunk][-1]}")
            # A tuple is told from a tensor by an empty place in front.
            self._give("forward", chunk + 1, micro, [None, *out] if type(value) is tuple else out)
        self._runs[chunk, micro] = leaves, out

    def _loss_of(self, value: Any, micro: int) -> Tensor:
        loss = self._loss(value, self._of_micro(self._targets, micro))
        if loss.dim():
            raise ShapeError(
                f"the loss has the shape {tuple(loss.shape)}; it must be a single number, the mean "
                "over the samples"
            )
        self._losses[micro] = float(loss.detach())
        share = self._shares[micro]
        return loss if share == 1 else loss * share

    def _backward(self, action: Action) -> None:
        chunk, micro = action.chunk, action.micro
        leaves, out = self._runs.pop((chunk, micro))
        grads: Sequence[Tensor | None] = [None] * len(out)
        if chunk + 1 < self._schedule.chunks:
            grads = self._take("back", chunk, micro, chunk + 1)
            pairs = [(t, grad) for t, grad in zip(out, grads, strict=True) if grad is not None]
            out, grads = [t for t, _ in pairs], [grad for _, grad in pairs]
        if out:
            torch.autograd.backward(out, grads)
        if chunk:
            self._give("back", chunk - 1, micro, [contiguous(leaf.grad) for leaf in leaves])

    def _share(self) -> None:
        """Tell the other stages the losses and the buffers that have changed; take in theirs."""
        if self._links is None:
            return
        changed = self._pieces.changed()
        numbers = torch.tensor([number for number, _ in changed])
        losses = torch.tensor(list(self._losses.items()), dtype=torch.float64)
        mine = to_arrays([losses, numbers, *(buffer for _, buffer in changed)])
        for letter in self._exchange("end", range(self._place.processes), mine):
            told, order, *buffers = _all(from_arrays(letter))
            self._losses |= {int(micro): loss for micro, loss in told.tolist()}
            for number, buffer in zip(order.tolist(), buffers, strict=True):
                self._pieces.set_buffer(int(number), buffer)


def _all(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
