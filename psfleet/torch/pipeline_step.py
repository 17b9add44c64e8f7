"""One step of a pipeline, as one stage takes it: micro-batches through its chunks, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from psfleet.errors import ShapeError
from psfleet.stages import links as ways
from psfleet.stages.links import here
from psfleet.stages.schedule import Action, Schedule, Work
from psfleet.torch.sequential_chunks import StageModules, StepSeeds, contiguous
from psfleet.torch.stage_messages import from_arrays, micro_batch, tensors_of, to_arrays

__all__ = ["Loss", "PipelineStep"]

Loss = Callable[[Any, Any], Tensor]


class PipelineStep:
    """One step of this stage."""

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
        self._pieces = pieces
        self._schedule = schedule
        self._edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        self._inputs = inputs
        self._targets = targets
        self._loss = loss
        self._seeds = seeds
        self._place = here()
        self._links = ways.links(pieces.queue_size) if self._place.processes > 1 else None
        self._number = ways.next_step()
        self._mail: dict[str, list[Tensor | None]] = {}  # between chunks of this stage
        # By chunk and micro-batch: the leaves that came in and what went out.
        self._runs: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._losses: dict[int, float] = {}

    def complete(self) -> float:
        """Forward and back through this stage's chunks; the loss of the whole batch."""
        for action in self._schedule.stages[self._place.stage]:
            if action.work is Work.FORWARD:
                self._forward(action)
            else:
                self._backward(action)
        self._share()
        return sum(self._share_of(micro) * loss for micro, loss in sorted(self._losses.items()))

    def _share_of(self, micro: int) -> float:
        return (self._edges[micro + 1] - self._edges[micro]) / self._edges[-1]

    def _of_micro(self, batch: Any, micro: int) -> Any:
        return micro_batch(batch, self._edges[micro], self._edges[micro + 1])

    # -- one action ----------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        chunk, micro = action.chunk, action.micro
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
        share = self._share_of(micro)
        return loss if share == 1 else loss * share

    def _backward(self, action: Action) -> None:
        chunk, micro = action.chunk, action.micro
        leaves, out = self._runs.pop((chunk, micro))
        grads: list[Tensor | None] = [None] * len(out)
        if chunk + 1 < self._schedule.chunks:
            grads = self._take("back", chunk, micro, chunk + 1)
            pairs = zip(out, grads, strict=True)
            out, grads = [], []
            for tensor, grad in pairs:
                if grad is not None:
                    out.append(tensor)
                    grads.append(grad)
        if out:
            torch.autograd.backward(out, grads)
        if chunk:
            self._give("back", chunk - 1, micro, [contiguous(leaf.grad) for leaf in leaves])

    # -- between chunks ------------------------------------------------------------------------

    def _tag(self, way: str, chunk: int, micro: int) -> str:
        return f"{self._number}/{way}/{micro}/{chunk}"

    def _give(self, way: str, chunk: int, micro: int, tensors: Sequence[Tensor | None]) -> None:
        tag = self._tag(way, chunk, micro)
        process = self._place.runner(self._schedule.stage_of(chunk), micro)
        if self._links is not None and process != self._place.process:
            self._links.send(process, tag, to_arrays(tensors))
        else:
            self._mail[tag] = [
                None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors
            ]

    def _take(self, way: str, chunk: int, micro: int, source: int) -> list[Tensor | None]:
        tag = self._tag(way, chunk, micro)
        process = self._place.runner(self._schedule.stage_of(source), micro)
        if self._links is not None and process != self._place.process:
            return from_arrays(self._links.receive(process, tag))
        return self._mail.pop(tag)

    def _share(self) -> None:
        """Tell the other stages the losses and the buffers that have changed; take in theirs."""
        if self._links is None:
            return
        tag = f"{self._number}/end"
        changed = self._pieces.changed()
        numbers = torch.tensor([number for number, _ in changed])
        losses = torch.tensor(list(self._losses.items()), dtype=torch.float64)
        letter = to_arrays([losses, numbers, *(buffer for _, buffer in changed)])
        for process in self._place.others:
            self._links.send(process, tag, letter)
        for process in self._place.others:
            told, order, *buffers = _all(from_arrays(self._links.receive(process, tag)))
            self._losses |= {int(micro): loss for micro, loss in told.tolist()}
            for number, buffer in zip(order.tolist(), buffers, strict=True):
                self._pieces.set_buffer(int(number), buffer)


def _all(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
