"""Batches of a source as a plain sequence, in a process of its own or in one of any framework.

files = ParquetFiles("clicks/", features, labels=["click"])
for batch in Batches(files, 1024, epochs=2, shuffle_seed=7):
    ...
loader = torch.utils.data.DataLoader(Batches(files, 1024)[rank::ranks], batch_size=None, num_workers=4)
"""

from collections.abc import Iterator, Sequence
from typing import Any, overload

from typing_extensions import override

from psfleet.datasets.dispatch import OrderedSource, size_of
from psfleet.datasets.read_ahead import ReadAhead
from psfleet.datasets.round_plan import MOST
from psfleet.errors import UsageError
from psfleet.validation.annotations import NonNegativeInt, PositiveInt, checked


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
