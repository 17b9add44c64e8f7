"""Loop of `fleet.dataset`: gets the positions of each step's samples from the fleet, and reads the samples.

It joins two sides. A runtime knows the positions that this worker has in the next step (in a cluster server 0
assigns each sample to exactly one worker), and a source reads the samples at given positions. With `prefetch`
a thread reads ahead; everything else runs in the thread of the loop.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import numpy as np

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.round_plan import MOST, Range, SourceParts
from psfleet.core.runtime.process_runtime import active
from psfleet.core.runtime.script_runtime import ScriptRuntime
from psfleet.core.runtime.stages import here
from psfleet.data.batches import GrowingSource, OrderedSource, SampleSequence, Source, size_of
from psfleet.data.read_ahead import Peekable, ReadAhead


def batches(
    source: Source,
    batch_size: int,
    epochs: int | None,
    shuffle_seed: int | None,
    merged: int,
    runtime: Callable[[], ScriptRuntime] = active,
    prefetch: int = 0,
) -> Peekable[Any]:
    """Return an iterator over the batches of a dataset for this worker.

    Args:
        epochs: Number of passes over all samples, or None to go on until the script stops.
        shuffle_seed: Seed of the order of samples, or None for the source's own order.
        merged: Number of batches whose gradients are pushed together (`gradient_merge`).
        prefetch: Number of batches that a thread reads ahead.
    """
    dataset = _DatasetPass(source, batch_size, epochs, shuffle_seed, prefetch, runtime)
    return Peekable(dataset.run(merged), dataset.peek)


class _DatasetPass:
    """State of one loop over a dataset."""

    def __init__(
        self,
        source: Source,
        batch_size: int,
        epochs: int | None,
        shuffle_seed: int | None,
        prefetch: int,
        runtime: Callable[[], ScriptRuntime],
    ) -> None:
        self._runtime = runtime
        self._size = size_of(source)
        self._source = source if isinstance(source, Sized) else self._size
        self._batch = batch_size
        self._epochs = MOST // self._size if epochs is None else epochs
        self._seed = shuffle_seed
        self._order = SampleSequence(self._size, self._seed)
        self._prefetch = prefetch
        self._ahead: ReadAhead | None = None
        self._seen: tuple[tuple[Range, ...], Any] = ((), None)

    def run(self, merged: int) -> Iterator[Any]:
        """Yield the batches. The gradients of `merged` of them are pushed together."""
        if self._size * self._epochs > MOST:
            raise UsageError(
                f"dataset epochs is {self._epochs}, which is too many for {self._size} samples; use "
                "None to train until the script stops"
            )
        self._check_alone(merged)
        runtime = self._runtime()
        with self._reading_ahead():
            for ranges in self._steps(runtime, merged):
                # `peek` may have read this batch before. The fleet may have assigned other positions since,
                # for example because a worker died.
                (next_ranges, samples), self._seen = self._seen, ((), None)
                samples = samples if next_ranges == ranges else self._samples(ranges)
                if self._waits and merged == 1 and len(samples) == 0:
                    # A topic has no message at these positions. The step still needs its push, because rounds
                    # and leases count steps.
                    runtime.push([])
                else:
                    yield samples

    def _check_alone(self, merged: int) -> None:
        idle = getattr(self._source, "idle", None) is not None and (
            merged > 1 or here().processes > 1
        )
        if idle or (self._sections() is not None and here().processes > 1):
            raise UsageError(
                "a topic with an idle time leaves steps out, and one with find_partitions asks for more, as "
                "other processes of a pipeline and merged gradients cannot; leave out idle and "
                "find_partitions, or pipeline and gradient_merge"
            )

    def _sections(self) -> Iterator[tuple[int, SourceParts]] | None:
        return (
            self._source.sections(self._batch) if isinstance(self._source, GrowingSource) else None
        )

    def _steps(self, runtime: ScriptRuntime, merged: int) -> Iterator[tuple[Range, ...]]:
        seed = -1 if self._seed is None else self._seed
        sections = self._sections()
        if sections is None:
            yield from runtime.data_steps(
                runtime, self._size, self._batch, self._epochs, seed, merged
            )
        for size, parts in sections or ():
            yield from runtime.data_steps(runtime, size, self._batch, 1, seed, merged, parts)

    @property
    def _waits(self) -> bool:
        return isinstance(self._source, OrderedSource) and self._source.waits

    @contextlib.contextmanager
    def _reading_ahead(self) -> Iterator[None]:
        """Start a thread that reads ahead, if `prefetch` is set and the source allows it.

        The thread ends with the block.
        """
        source = self._source
        if self._prefetch and isinstance(source, OrderedSource) and not self._waits:
            self._ahead = ReadAhead(self._prepare, self._size, self._prefetch)
        try:
            yield
        finally:
            if self._ahead is not None:
                self._ahead.close()

    def peek(self) -> Any:
        """Return the next batch, or None if the fleet has not assigned its positions yet."""
        if self._waits:  # the present step must not wait until messages of the next one arrive
            return None
        ranges = self._runtime().next_ranges
        if ranges and ranges != self._seen[0]:
            self._seen = (ranges, self._samples(ranges))
        return self._seen[1] if ranges else None

    def _samples(self, ranges: Sequence[Range]) -> Any:
        if self._ahead is not None:
            return self._ahead.take(tuple(ranges))
        if isinstance(self._source, OrderedSource):
            return self._prepare(ranges)()
        indices = self._order.samples(ranges)
        if isinstance(self._source, int):
            return indices
        if isinstance(self._source, np.ndarray):
            return self._source[indices]
        return [self._source[index] for index in indices]

    def _prepare(self, ranges: Sequence[Range]) -> Callable[[], Any]:
        assert isinstance(self._source, OrderedSource)
        return self._source.prepare(ranges, self._batch, self._seed)
