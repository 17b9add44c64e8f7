"""Batches of a source, by number, in any process.

`fleet.dataset` hands out the same batches, see psfleet.core.runtime.dataset_pass.

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


def size_of(source: Source) -> int:
    """Return the number of samples; at least one."""
    size = len(source) if isinstance(source, Sized) else source
    return int(check("dataset", "size", size, PositiveInt))


class SampleSequence:
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
        source: ParquetFiles, TextFiles, RecordBatches or KafkaTopic.
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
