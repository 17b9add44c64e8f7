"""Pipeline: an nn.Sequential trained in micro-batches, by as many stages as the launcher starts."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from psfleet import fleet
from psfleet.errors import ShapeError
from psfleet.pipeline import links as ways
from psfleet.pipeline.links import here
from psfleet.pipeline.pipelining import check_share
from psfleet.pipeline.schedule import Action, Schedule, Work, make_schedule
from psfleet.runtime import Runtime
from psfleet.strategy import Settings
from psfleet.torch.conversion import converted
from psfleet.torch.cutting import check_cuts, chunks_of, refuse_shared
from psfleet.torch.letters import from_arrays, micro_batch, samples_of, tensors_of, to_arrays
from psfleet.torch.optimizers import DistributedOptimizer
from psfleet.torch.planning import Optimizers
from psfleet.torch.recompute import blocks_of, check_repeatable, grouped, recompute
from psfleet.torch.strategies import check_strategy, pipeline_of

__all__ = ["Pipeline"]

Loss = Callable[[Any, Any], Tensor]


class _CutOptimizer(DistributedOptimizer):
    """Of a model that is trained in pieces."""

    _cut = True

    def _prepare(self, model: nn.Module, settings: Settings) -> None:
        if settings.recompute is not None and settings.recompute.checkpoints:
            recompute(model, settings.recompute)


class Pipeline:
    """Trains an nn.Sequential, cut into the stages that `psfleet-launch --stages` starts.

        trainer = Pipeline(model, torch.optim.Adam(model.parameters()), nn.functional.mse_loss)
        for x, y in fleet.shard(loader):
            loss = trainer.step(x, y)

    The same script runs in one process and on stages: every stage runs all of it with the same batches
    and computes its own modules. With the same micro-batches, losses and weights are the same bits on
    any number of stages, in every schedule. Without a launcher there is one micro-batch, the batch.

    The model is moved to the servers as convert() does. `model(x)` and `model.state_dict()` are of the
    whole model, in every stage.

    Args:
        model: Is changed in place. Its modules give a tensor or a tuple of tensors.
        optimizers: As for convert().
        loss: Of the model's output and the targets: a mean over the samples.
        cuts: Places of the modules that begin a piece, such as [2, 5]; None: pieces of about equal
            work, found with the first batch.
        name, runtime: As for DistributedOptimizer.

    Attributes:
        model: The converted model.
        optimizer: Its DistributedOptimizer, for schedulers of the learning rate.

    Raises:
        ConfigError: The strategy asks for what there is not, see docs/torch.md.
        UsageError: The model or the optimizers cannot be cut.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        loss: Loss,
        *,
        cuts: Sequence[int] | None = None,
        name: str = "",
        runtime: Runtime | None = None,
    ) -> None:
        settings = fleet.settings()
        check_strategy(settings, cut=True)
        self._asked = pipeline_of(settings)
        self._cuts = cuts
        self._loss = loss
        check_cuts(model, cuts)
        if cuts is not None:
            check_share(len(cuts) + 1, here().stages)
        wish = settings.recompute
        self._recomputes = wish is not None and not wish.checkpoints
        if wish is not None and wish.checkpoints:
            blocks_of(model, wish)
        elif wish is not None:
            check_repeatable("", model)
        self.model, self.optimizer = converted(
            check_cuts(model, cuts), optimizers, _CutOptimizer, name=name, runtime=runtime
        )
        self._seed = torch.initial_seed()
        self._steps = 0
        self._pieces: _Pieces | None = None

    def step(self, inputs: Any, targets: Any) -> Tensor:
        """Train on one batch: all micro-batches forward and back, then one update.

        Args:
            inputs: Of the first module: tensors of equal length, in tuples, lists and dicts.
            targets: Of the loss, likewise.

        Returns:
            The loss of the batch before the update, float32 []; the same in every stage.

        Raises:
            ShapeError: Tensors differ in length, or the loss is no single number.
        """
        samples = samples_of((inputs, targets))
        sizes = _sizes(samples, self._asked.micro_batches)
        if self._pieces is None:
            self._pieces = self._cut(micro_batch(inputs, 0, sizes[0]))
        self.optimizer.zero_grad()
        schedule = self._schedule(self._pieces, len(sizes))
        seeds = _Seeds(self._seed, here().worker, self._steps)
        run = _Step(self._pieces, schedule, sizes, inputs, targets, self._loss, seeds)
        loss = run.complete()
        self._steps += 1
        self.optimizer.step(samples=0 if here().process else samples, loss=loss)
        return torch.tensor(loss)

    def _cut(self, batch: Any) -> "_Pieces":
        stages = max(self._asked.stages, here().stages)
        chunks = chunks_of(self.model, self._cuts, stages * self._asked.per_stage, batch)
        refuse_shared(self.model, chunks)
        pieces = _Pieces(
            self.model, chunks, here().stages, self._recomputes, self._asked.queue_size
        )
        self.optimizer.narrow(pieces.own)
        return pieces

    def _schedule(self, pieces: "_Pieces", micro_batches: int) -> Schedule:
        per_stage = len(pieces.chunks) // here().stages
        return make_schedule(self._asked.schedule, here().stages, micro_batches, per_stage)


class _Pieces:
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

    def forward(self, chunk: int, value: Any, micro: int, seeds: "_Seeds") -> Any:
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

    def _through(self, places: range, value: Any, micro: int, seeds: "_Seeds") -> Any:
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


class _Seeds:
    """Seeds of one step's random numbers: of each module and micro-batch its own, in any stage.

    Random numbers that the script draws itself are what they were.
    """

    def __init__(self, seed: int, worker: int, step: int) -> None:
        self._begin = f"{seed}/{worker}/{step}"

    def of(self, micro: int, place: int) -> "_Seeded":
        """A context in which a module computes."""
        text = f"{self._begin}/{micro}/{place}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return _Seeded(int.from_bytes(digest, "little") >> 1)


class _Seeded:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self._seed)

    def __exit__(self, *error: object) -> None:
        torch.default_generator.set_state(self._before)


class _Step:
    """One step of this stage."""

    def __init__(
        self,
        pieces: _Pieces,
        schedule: Schedule,
        sizes: Sequence[int],
        inputs: Any,
        targets: Any,
        loss: Loss,
        seeds: _Seeds,
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
            self._give("back", chunk - 1, micro, [_contiguous(leaf.grad) for leaf in leaves])

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


def _sizes(samples: int, micro_batches: int) -> list[int]:
    """Samples of each micro-batch: as equal as can be, the first ones larger, none empty."""
    count = max(min(micro_batches, samples), 1)
    least, longer = divmod(samples, count)
    return [least + (i < longer) for i in range(count)]


def _buffers(module: nn.Module) -> Iterator[Callable[[], Any]]:
    """How to get at each buffer, which its module may replace."""
    for part in module.modules():
        for key, buffer in part._buffers.items():
            if buffer is not None:
                yield partial(part._buffers.__getitem__, key)


def _smooth(value: Any, place: int) -> Any:
    """What a module gives, laid out as if it and its gradient were sent: so bits depend on no cut."""
    tensors = [_contiguous(tensor) for tensor in tensors_of(value, f"module {place}")]
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(_contiguous)
    return tuple(tensors) if isinstance(value, tuple) else tensors[0]


def _contiguous(tensor: Any) -> Any:
    return None if tensor is None else tensor.contiguous()


def _all(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
