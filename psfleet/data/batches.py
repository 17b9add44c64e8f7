"""Interface of a data source (OrderedSource), and batches of a source without a fleet (Batches).

A source maps positions to samples, and all reading of data builds on this. `fleet.dataset` assigns
positions to workers (psfleet.core.runtime.dataset_pass). `Batches` yields the same batches in a single
process or a torch DataLoader:

    files = ParquetFiles("clicks/", features, labels=["click"])
    for batch in Batches(files, 1024, epochs=2, shuffle_seed=7):
        ...
    loader = torch.utils.data.DataLoader(Batches(files, 1024)[rank::ranks], batch_size=None, num_workers=4)
"""

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Protocol, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import NonNegativeInt, PositiveInt, check, checked
from psfleet.core.engine.round_plan import MOST, Range, SourceParts
from psfleet.data.read_ahead import ReadAhead

Ids = NDArray[np.int64]


@runtime_checkable
class OrderedSource(Protocol):
    """Data source that determines the order of its samples itself, such as files with their rows.

    Attributes:
        waits: True if reading waits for samples that do not exist yet. Batches are then not read ahead.
    """

    waits: bool

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""

    def prepare(
        self, ranges: Sequence[Range], batch_size: int, seed: int | None
    ) -> Callable[[], Any]:
        """Read the samples at these positions. Position e * len + i is sample i in the order of epoch e.

        The samples must depend only on the arguments, not on the worker or on earlier calls, because a job
        that resumes must get the same samples. Only one thread at a time calls this, but not always the
        same thread.

        Args:
            ranges: Ranges of positions (psfleet.core.engine.round_plan).
            batch_size: Batch size of the dataset. The order may depend on it.
            seed: Seed that shuffles each epoch, or None for the source's own order.

        Returns:
            A function that reports bad samples and returns the good samples. It is called when the batch is
            used.
        """


@runtime_checkable
class GrowingSource(OrderedSource, Protocol):
    """Data source that can grow while it is read, such as a topic that gets more partitions."""

    def sections(self, batch_size: int) -> Iterator[tuple[int, SourceParts]] | None:
        """Yield the size and the parts of each section, or return None if the source cannot grow.

        Sections are read one after the other. A section is a dataset with positions from 0. Its parts (for
        example the partitions of a topic) do not change, so that all workers read the same parts.
        """


Source = int | Sequence[Any] | NDArray[Any] | OrderedSource


def size_of(source: Source) -> int:
    """Return the number of samples of a source, which is at least 1.

    Raises:
        WrongType, ConfigError: `source` has no size, or is empty.
    """
    size = len(source) if isinstance(source, Sized) else source
    return int(check("dataset", "size", size, PositiveInt))


class SampleSequence:
    """Order of the samples 0 to size - 1 in each epoch.

    With a seed, the order is a permutation that depends only on the seed and the epoch, so that every
    process computes the same order.

    Args:
        seed: Seed, or None for the order 0, 1, 2, ... in each epoch.
    """

    def __init__(self, size: int, seed: int | None) -> None:
        self._size = size
        self._seed = seed
        self._epoch = -1
        self._shuffled: Ids = np.empty(0, np.int64)

    def samples(self, ranges: Sequence[Range]) -> Ids:
        """Return the numbers of the samples at these positions, in the order of the positions, int64 [n]."""
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
    """Batches of a source as a sequence. They are the same batches that `fleet.dataset` assigns to workers.

        batches = Batches(files, 1024, epochs=2, shuffle_seed=7)
        batches[5]               # the sixth batch, read now
        batches[rank::ranks]     # the batches of one of several processes
        batches[100:]            # the batches after the first 100, to resume

    Indexing reads one batch, and a loop reads one after the other. A slice reads nothing.

    Args:
        source: ParquetFiles, TextFiles, RecordBatches or KafkaTopic.
        batch_size: Number of samples in a batch. The last batch of an epoch may have fewer.
        epochs: Number of passes over all samples. Must be 1 for a topic without an end.
        shuffle_seed: Seed that gives each epoch another order, or None for the source's own order.
        prefetch: Number of batches that a thread reads ahead of a loop.

    Raises:
        UsageError: `epochs` times the number of samples is too large.
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
        epoch, batch_in_epoch = divmod(number, self._each)
        low = batch_in_epoch * self._batch_size
        start = epoch * self._size
        return start + low, start + min(low + self._batch_size, self._size)

    def _prepare(self, ranges: Any) -> Any:
        return self._source.prepare(ranges, self._batch_size, self._seed)
