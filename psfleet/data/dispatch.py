"""fleet.dataset: samples in batches, each handed to one worker by the fleet."""

import contextlib
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from psfleet.data.assignment import MOST, Range
from psfleet.data.peekable import Peekable
from psfleet.data.read_ahead import ReadAhead
from psfleet.errors import UsageError
from psfleet.runtime import interface as runtimes
from psfleet.runtime.interface import Runtime
from psfleet.validation.annotations import PositiveInt, check

__all__ = ["OrderedSource", "Source", "batches", "size_of"]

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


Source = int | Sequence[Any] | NDArray[Any] | OrderedSource


def batches(
    source: Source,
    batch_size: int,
    epochs: int | None,
    shuffle_seed: int | None,
    merged: int,
    runtime: Callable[[], Any] = runtimes.active,
    prefetch: int = 0,
) -> Peekable[Any]:
    """See Fleet.dataset; `merged`: batches of one push."""
    dataset = _DatasetPass(source, batch_size, epochs, shuffle_seed, prefetch, runtime)
    return Peekable(dataset.run(merged), dataset.peek)


def size_of(source: Source) -> int:
    """How many samples there are; at least one."""
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
        self._batch = check("dataset", "batch_size", batch_size, PositiveInt)
        rounds = check("dataset", "epochs", epochs, PositiveInt | None)
        self._epochs = MOST // self._size if rounds is None else rounds
        self._seed = check("dataset", "shuffle_seed", shuffle_seed, int | None)
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
        runtime = self._runtime()
        seed = -1 if self._seed is None else self._seed
        asked = (self._size, self._batch, self._epochs, seed, merged)
        with self._reading_ahead():
            for ranges in runtime.shares(_RuntimePusher(runtime), *asked):
                (coming, samples), self._seen = self._seen, ((), None)
                yield samples if coming == ranges else self._samples(ranges)

    @contextlib.contextmanager
    def _reading_ahead(self) -> Iterator[None]:
        """A thread reads ahead, if that is wanted."""
        source = self._source
        if self._prefetch and isinstance(source, OrderedSource) and not source.waits:
            self._ahead = ReadAhead(self._prepare, self._size, self._prefetch)
        try:
            yield
        finally:
            if self._ahead is not None:
                self._ahead.close()

    def peek(self) -> Any:
        """The next batch, if this worker has it already; else None."""
        ranges = getattr(self._runtime(), "coming", ())
        if ranges and ranges != self._seen[0]:
            self._seen = (ranges, self._samples(ranges))
        return self._seen[1] if ranges else None

    def _samples(self, ranges: Sequence[Range]) -> Any:
        if self._ahead is not None:
            return self._ahead.take(tuple(ranges))
        if isinstance(self._source, OrderedSource):
            return self._prepare(ranges)()
        chosen = self._order.samples(ranges)
        if isinstance(self._source, int):
            return chosen
        if isinstance(self._source, np.ndarray):
            return self._source[chosen]
        return [self._source[index] for index in chosen]

    def _prepare(self, ranges: Sequence[Range]) -> Callable[[], Any]:
        assert isinstance(self._source, OrderedSource)
        return self._source.prepare(ranges, self._batch, self._seed)


class _RuntimePusher:
    """Who pushes, for the one who deals."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def skip(self) -> None:
        """A step without gradients."""
        self._runtime.push([])

    def flush(self) -> None:
        """Wait until every push is applied."""
        self._runtime.flush()


class _SampleSequence:
    """Which sample is at which position: a pure function of seed and epoch."""

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
