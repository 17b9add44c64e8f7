"""Samples in batches: each handed to one worker by the fleet, or a plain sequence in any process.

files = ParquetFiles("clicks/", features, labels=["click"])
for batch in Batches(files, 1024, epochs=2, shuffle_seed=7):
    ...
loader = torch.utils.data.DataLoader(Batches(files, 1024)[rank::ranks], batch_size=None, num_workers=4)
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Protocol, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import NonNegativeInt, PositiveInt, check, checked
from psfleet.core.engine.interface import Runtime
from psfleet.core.engine.round_plan import MOST, Range, SourceParts
from psfleet.core.runtime.process_runtime import active
from psfleet.core.runtime.stages import here
from psfleet.data.read_ahead import Peekable, ReadAhead

Ids = NDArray[np.int64]


@runtime_checkable
class OrderedSource(Protocol):
    """Samples that are read in an order of their own, such as that of the files in which they are.

    Attributes:
        waits: Reading waits for samples that are yet to come: none are read ahead.
    """

    waits: bool

    def __len__(self) -> int:
        """The number of samples."""

    def prepare(
        self, ranges: Sequence[Range], batch_size: int, seed: int | None
    ) -> Callable[[], Any]:
        """Read the samples at these positions; sample i of epoch e is at e * len + i.

        A pure function of the arguments, whichever worker and thread calls it; one does at a time.

        Returns:
            Reports what was wrong, and returns the samples.
        """


@runtime_checkable
class GrowingSource(OrderedSource, Protocol):
    """A source with parts that become more while it is read."""

    def sections(self, batch_size: int) -> Iterator[tuple[int, SourceParts]] | None:
        """Sections that are read one after the other, each with its size and the parts that it has.

        Each is a dataset of its own, with positions from 0 on, so that all workers read the same parts. None:
        nothing becomes more, and the source is one dataset.
        """


Source = int | Sequence[Any] | NDArray[Any] | OrderedSource


def batches(
    source: Source,
    batch_size: int,
    epochs: int | None,
    shuffle_seed: int | None,
    merged: int,
    runtime: Callable[[], Any] = active,
    prefetch: int = 0,
) -> Peekable[Any]:
    """See Fleet.dataset; `merged`: batches of one push."""
    dataset = _DatasetPass(source, batch_size, epochs, shuffle_seed, prefetch, runtime)
    return Peekable(dataset.run(merged), dataset.peek)


def size_of(source: Source) -> int:
    """Return the number of samples; at least one."""
    size = len(source) if isinstance(source, Sized) else source
    return int(check("dataset", "size", size, PositiveInt))


class _DatasetPass:
    """One use of a dataset."""

    def __init__(
        self,
        source: Source,
        batch_size: int,
        epochs: int | None,
        shuffle_seed: int | None,
        prefetch: int,
        runtime: Callable[[], Any],
    ) -> None:
        self._runtime = runtime
        self._size = size_of(source)
        self._source = source if isinstance(source, Sized) else self._size
        self._batch = batch_size
        self._epochs = MOST // self._size if epochs is None else epochs
        self._seed = shuffle_seed
        self._order = _SampleSequence(self._size, self._seed)
        self._prefetch = prefetch
        self._ahead: ReadAhead | None = None
        self._seen: tuple[tuple[Range, ...], Any] = ((), None)

    def run(self, merged: int) -> Iterator[Any]:
        """The batches."""
        if self._size * self._epochs > MOST:
            raise UsageError(
                f"dataset epochs is {self._epochs}, which is too many for {self._size} samples; use "
                "None to train until the script stops"
            )
        self._check_alone(merged)
        runtime = self._runtime()
        with self._reading_ahead():
            for ranges in self._steps(runtime, merged):
                (next_ranges, samples), self._seen = self._seen, ((), None)
                samples = samples if next_ranges == ranges else self._samples(ranges)
                if self._waits and merged == 1 and len(samples) == 0:
                    runtime.push([])  # what these positions stand for is not there
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

    def _steps(self, runtime: Runtime, merged: int) -> Iterator[tuple[Range, ...]]:
        pusher, seed = _RuntimePusher(runtime), -1 if self._seed is None else self._seed
        cluster: Any = runtime
        sections = self._sections()
        if sections is None:
            yield from cluster.data_steps(
                pusher, self._size, self._batch, self._epochs, seed, merged
            )
        for size, parts in sections or ():
            yield from cluster.data_steps(pusher, size, self._batch, 1, seed, merged, parts)

    @property
    def _waits(self) -> bool:
        return isinstance(self._source, OrderedSource) and self._source.waits

    @contextlib.contextmanager
    def _reading_ahead(self) -> Iterator[None]:
        """A thread reads ahead, if that is wanted."""
        source = self._source
        if self._prefetch and isinstance(source, OrderedSource) and not self._waits:
            self._ahead = ReadAhead(self._prepare, self._size, self._prefetch)
        try:
            yield
        finally:
            if self._ahead is not None:
                self._ahead.close()

    def peek(self) -> Any:
        """The next batch, if this worker has it already; else None."""
        if self._waits:  # the present step must not wait for samples of the next one
            return None
        ranges = getattr(self._runtime(), "next_ranges", ())
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


class _RuntimePusher:
    """Pusher of a dataset loop, made of a runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def skip(self) -> None:
        """A step without gradients."""
        self._runtime.push([])

    def flush(self) -> None:
        """Wait until every push is applied."""
        self._runtime.flush()


class _SampleSequence:
    """Order of samples: the sample at each position, a pure function of seed and epoch."""

    def __init__(self, size: int, seed: int | None) -> None:
        self._size = size
        self._seed = seed
        self._epoch = -1
        self._shuffled: Ids = np.empty(0, np.int64)

    def samples(self, ranges: Sequence[Range]) -> Ids:
        """int64 indices of the samples at these positions, in order."""
        return np.concatenate([self._of(low, high) for low, high in ranges])

    def _of(self, low: int, high: int) -> Ids:
        epoch, start = divmod(low, self._size)
        if self._seed is None:
            return np.arange(start, start + high - low, dtype=np.int64)
        if epoch != self._epoch:
            dice = np.random.default_rng((abs(self._seed), self._seed < 0, epoch))
            self._epoch, self._shuffled = epoch, dice.permutation(self._size).astype(np.int64)
        return self._shuffled[start : start + high - low]


class Batches(Sequence[Any]):
    """The batches of a source, by their numbers; `fleet.dataset` hands out the same ones.

    They are read when they are asked for. A slice has some of them: `batches[rank::ranks]` those of one of
    several processes, `batches[100:]` those that are left after 100.

    Args:
        source: ParquetFiles, TextFiles, RecordBatches, KafkaTopic or EventTimeSequence.
        batch_size: Samples of a batch; an epoch's last one has fewer.
        epochs: Number of passes over all samples; a topic without an end has one.
        shuffle_seed: Each epoch has another order, which follows from this; None: as they are.
        prefetch: A loop reads and decodes so many batches ahead in a thread.

    Raises:
        UsageError: The source has no samples, or too many for so many epochs.
    """

    @checked
    def __init__(
        self,
        source: OrderedSource,
        batch_size: PositiveInt,
        epochs: PositiveInt = 1,
        shuffle_seed: int | None = None,
        prefetch: NonNegativeInt = 0,
    ) -> None:
        self._source = source
        self._size = size_of(source)
        if self._size * epochs > MOST:
            raise UsageError(f"epochs is {epochs}, too many for {self._size} samples")
        self._batch_size, self._seed = batch_size, shuffle_seed
        self._prefetch = 0 if source.waits else prefetch
        self._each = -(-self._size // batch_size)
        self._numbers = range(epochs * self._each)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, number: int) -> Any: ...

    @overload
    def __getitem__(self, number: slice) -> "Batches": ...

    @override
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, int):
            return self._prepare((self._range(self._numbers[number]),))()
        part = object.__new__(Batches)
        part.__dict__ |= self.__dict__ | {"_numbers": self._numbers[number]}
        return part

    @override
    def __iter__(self) -> Iterator[Any]:
        if not self._prefetch:
            for number in self._numbers:
                yield self._prepare((self._range(number),))()
            return
        ahead = ReadAhead(self._prepare, self._size, self._prefetch)
        try:
            for number in self._numbers:
                yield ahead.take((self._range(number),))
        finally:
            ahead.close()

    def _range(self, number: int) -> tuple[int, int]:
        epoch, place = divmod(number, self._each)
        low = place * self._batch_size
        start = epoch * self._size
        return start + low, start + min(low + self._batch_size, self._size)

    def _prepare(self, ranges: Any) -> Any:
        return self._source.prepare(ranges, self._batch_size, self._seed)
