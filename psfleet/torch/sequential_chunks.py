"""The chunks of an nn.Sequential: their forward passes, random numbers and buffers."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from psfleet.stages.links import here
from psfleet.torch.recompute_blocks import grouped
from psfleet.torch.stage_messages import tensors_of

__all__ = ["StageModules", "StepSeeds", "contiguous"]


class StageModules:
    """The model's chunks, and which of them this stage trains."""

    def __init__(
        self,
        model: nn.Sequential,
        chunks: Sequence[range],
        stages: int,
        recomputes: bool,
        queue_size: int,
    ) -> None:
        self.chunks = chunks
        self.queue_size = queue_size
        self._model = model
        self._stages = stages
        self._recomputes = recomputes
        self.own = [model[i] for c in self._of(here().stage) for i in chunks[c]]
        self._buffers = [
            (chunk % stages, buffer)
            for chunk, places in enumerate(chunks)
            for i in places
            for buffer in _buffers(model[i])
        ]
        self._told: dict[int, Tensor] = {}
        self.changed()

    def _of(self, stage: int) -> range:
        return range(stage, len(self.chunks), self._stages)

    def forward(self, chunk: int, value: Any, micro: int, seeds: "StepSeeds") -> Any:
        """What a chunk gives for a micro-batch."""
        places = self.chunks[chunk]
        if not (self._recomputes and torch.is_grad_enabled()):
            return self._through(places, value, micro, seeds)
        for run in grouped(len(places)):
            part = places[run.start : run.stop]
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
        found = []
        for number, (stage, holder) in enumerate(self._buffers):
            if stage != here().stage:
                continue
            # By value: not every kernel of torch counts its changes in the tensor's version.
            buffer, told = holder(), self._told.get(number)
            if told is None or not torch.equal(buffer, told):
                self._told[number] = buffer.clone()
                found.append((number, self._told[number]))
        return found

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
    """How to get at each buffer, which its module may replace."""
    for part in module.modules():
        for key, buffer in part._buffers.items():
            if buffer is not None:
                yield partial(part._buffers.__getitem__, key)


def _smooth(value: Any, place: int) -> Any:
    """What a module gives, laid out as if it and its gradient were sent: so bits depend on no cut."""
    tensors = [contiguous(tensor) for tensor in tensors_of(value, f"module {place}")]
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(contiguous)
    return tuple(tensors) if isinstance(value, tuple) else tensors[0]


def contiguous(tensor: Any) -> Any:
    """The tensor with its values side by side; None is None."""
    return None if tensor is None else tensor.contiguous()
