"""Messages of a Kafka topic as samples, which fleet.dataset hands out to the workers.

clicks = KafkaTopic("broker:9092", "clicks", features, ["click"], start={0: 0, 1: 0})
for batch in fleet.dataset(clicks, batch_size=1024):
    values = embed(batch.features)
    loss = loss_fn(values, batch.labels["click"])
"""

import functools
import itertools
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import sleep
from typing import Annotated, Any, Literal

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.logs import log_of
from psfleet.core.base.observability.logged_values import LAGS
from psfleet.core.base.validation.annotations import Range as Within
from psfleet.core.base.validation.annotations import checked
from psfleet.core.engine.round_plan import MOST, Range, SourceParts
from psfleet.data.feature_sets.feature_lookup import refused_samples
from psfleet.data.feature_sets.feature_set import FeatureSet
from psfleet.data.kafka_partition import Partition
from psfleet.data.row_order import RowRange, RowSequence
from psfleet.data.sample_batch import SampleBatch, batch_of, sample_of

_log = log_of(__name__)

_SAID = 5  # bad messages of which a line is printed
_KIBIBYTES = 16384  # of messages that the client fetches ahead, per partition
_WAIT = 0.1  # seconds until the broker is asked again
_SECTION = 128  # batches until the broker is asked for new partitions
_FOREIGN = {"auto.offset.reset", "bootstrap.servers", "enable.auto.commit", "enable.partition.eof"}


Place = tuple[int, int, int]
"""A partition, the first of its offsets, and the one behind the last."""
Sample = tuple[dict[str, Any], str]
"""The values of a message's columns, and the place of the message in the topic, for errors."""


@dataclass
class _Span:
    """Offsets of a partition that are to be read, from the first up to, and without, the second."""

    low: int
    high: int


@checked
class KafkaTopic:
    """The messages of a topic, as samples of a feature set: a source of `fleet.dataset`.

    A position stands for an offset of a partition, the same for every worker: blocks of `batch_size` offsets
    come from the partitions in turn. The fleet's positions are therefore those of the topic, also in
    snapshots, and no consumer group is used. Reading waits for messages that are yet to come.

    Args:
        servers: Brokers, HOST:PORT separated by commas.
        topic: Its name.
        features: The set. A message is a JSON object with the value, or list of values, of each feature under
            its column's name; what it lacks, or is null, is a feature that is missing.
        labels: Names of the labels in the object.
        start: By partition the first offset to read. Other partitions are not read, but see
            `find_partitions`.
        end: By partition the offset to stop before; None: go on until the script leaves the loop.
        bad_messages: Handling of a message with a value that cannot be used, and of offsets that
            the broker has deleted: "fail", or "skip" it, which is counted in `skipped` and reported
            on standard error.
        parse: Makes the mapping of a message's value; None: JSON. ValueError: it cannot.
        idle: Seconds without a message after which the order goes on without a partition, if others have
            messages: its offsets are put off, and come with later batches of this worker as soon as they have
            messages. Batches may then be smaller; a step whose batch would be empty is left out. None: the
            order waits. `fleet.remember(topic, source)` keeps what is put off, within one batch, for a worker
            that starts again. Only without `end`.
        find_partitions: Also read partitions with higher numbers than those of `start`, which the topic has
            or gets while it is read, from offset 0 on: the broker is asked after every 128 batches, and what
            one worker finds all read. Only in `fleet.dataset`, without `end`.
        settings: More settings of librdkafka, such as those for TLS.

    Attributes:
        skipped: Number of messages that this process has skipped.
        idle: Time limit, as passed.

    Raises:
        ConfigError: The offsets do not fit each other, or a setting is psfleet's own.
    """

    waits = True

    def __init__(
        self,
        servers: str,
        topic: str,
        features: FeatureSet,
        labels: Sequence[str] = (),
        *,
        start: Mapping[int, int],
        end: Mapping[int, int] | None = None,
        bad_messages: Literal["fail", "skip"] = "fail",
        parse: Callable[[bytes], Any] | None = None,
        idle: Annotated[float, Within(0)] | None = None,
        find_partitions: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        _check(start, end, settings or {})
        for name, value in (("idle", idle), ("find_partitions", find_partitions or None)):
            if value is not None and end is not None:
                raise ConfigError(
                    f"{name} is {value!r} for a topic that is read up to end={end!r}; leave one of them out"
                )
        self.finds_partitions = find_partitions
        self.idle = idle
        self.features = features
        self.labels = list(labels)
        self.skipped = 0
        self._skips = bad_messages == "skip"
        self._parse = parse or json.loads
        self._start = dict(sorted(start.items()))
        self._first = dict(self._start)  # by partition its first offset of the present section
        self._turn = 0  # batches before it
        self._parts: SourceParts | None = None
        self._put_off: defaultdict[int, deque[_Span]] = defaultdict(deque)
        self._sizes = None if end is None else [end[p] - first for p, first in self._start.items()]
        self._said = 0
        self._order: RowSequence | None = None
        own = {
            "bootstrap.servers": servers,
            "group.id": "psfleet",  # the client wants a name; nothing is committed
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "queued.max.messages.kbytes": _KIBIBYTES,
        }
        self._open = functools.partial(Partition, topic, own | dict(settings or {}))
        self._topic = topic
        self._partitions: dict[int, Partition] = {}

    def __len__(self) -> int:
        """The number of offsets; without an end as many as a dataset may have."""
        return MOST if self._sizes is None else sum(self._sizes)

    def sections(self, batch_size: int) -> Iterator[tuple[int, SourceParts]] | None:
        """The partitions that all workers know, for so many batches."""
        return self._found_sections(batch_size) if self.finds_partitions else None

    def _found_sections(self, batch_size: int) -> Iterator[tuple[int, SourceParts]]:
        self._first, self._turn = dict(self._start), 0
        count = max(self._start) + 1
        while True:
            self._parts = SourceParts(max(count, self._partition(max(self._start)).count()))
            yield _SECTION * batch_size, self._parts
            count, numbers = self._parts.count, self._numbers
            for number in numbers:
                self._first[number] = self._offset(number, _SECTION, batch_size)
            self._turn += _SECTION

    @property
    def _numbers(self) -> list[int]:
        newest = max(self._start)
        return [*self._start, *range(newest + 1, self._parts.count if self._parts else 0)]

    def _offset(self, number: int, turns: int, block: int) -> int:
        """First offset of a partition after so many batches of the section."""
        numbers = self._numbers
        place = (numbers.index(number) - self._turn) % len(numbers)
        return self._first.get(number, 0) + -(-max(turns - place, 0) // len(numbers)) * block

    def prepare(
        self, ranges: Sequence[Range], batch_size: int, seed: int | None
    ) -> Callable[[], SampleBatch]:
        """See OrderedSource.prepare. With `idle` what it returns also depends on when it is called.

        Raises:
            UsageError: The topic cannot be read; a message cannot be used, and bad messages are to fail.
        """
        if seed is not None:
            raise UsageError(
                f"shuffle_seed is {seed}; the messages of a topic come in their order, leave it out"
            )
        size = len(self)
        places = [
            place
            for low, high in ranges
            for place in self._places(low % size, low % size + high - low, batch_size)
        ]
        if self.idle is None:
            messages = [sample for place in places for sample in self._samples(*place)]
        else:
            messages = self._present(places, batch_size)
        LAGS.update({f"{self._topic}/{n}": each.lag for n, each in self._partitions.items()})
        batch = self._batch(messages)
        refused = refused_samples(self.features, batch.features, len(batch)) if self._skips else {}
        for number, text in refused.items():  # else the look-up says it
            self._bad(f"{messages[number][1]}: {text}", 1)
        if refused:
            batch = self._batch([each for n, each in enumerate(messages) if n not in refused])
        return lambda: batch

    def _batch(self, messages: Sequence[Sample]) -> SampleBatch:
        return batch_of(self.features, self.labels, [sample for sample, _ in messages])

    def _places(self, low: int, high: int, block: int) -> Iterator[Place]:
        for rows in self._ranges(low, high, block):
            partition = self._numbers[rows.group]
            first = self._first.get(partition, 0)
            yield partition, first + rows.low, first + rows.high

    def _ranges(self, low: int, high: int, block: int) -> Iterator[RowRange]:
        if self._sizes is not None:
            count = len(self._sizes)
            self._order = self._order or RowSequence(self._sizes, block, count, None, 0)
            yield from self._order.ranges(low, high)
            return
        partitions = len(self._numbers)
        while low < high:
            turn, skip = divmod(low, block)
            count, first = min(block - skip, high - low), turn // partitions * block + skip
            yield RowRange((self._turn + turn) % partitions, first, first + count)
            low += count

    def _present(self, places: Sequence[Place], block: int) -> list[Sample]:
        """Samples of these offsets and of those that are put off, no more than the places have.

        Their partitions are waited for until they are idle and there are samples, or another partition has
        messages that come later in the order.
        """
        for number, low, high in places:
            self._put_off[number].append(_Span(low, high))
        own, count = {place[0] for place in places}, sum(high - low for _, low, high in places)
        samples: list[Sample] = []
        while count:
            for number in tuple(self._put_off):
                self._drain(number, samples, count, self.idle if number in own else 0.0)
            late = [number for number in own if self._put_off[number]]
            if len(samples) == count or not any(self._put_off.values()):
                break
            if samples or self._others_have(places[-1], block):
                for number in late:
                    self._partition(number).say_idle()
                break
            sleep(_WAIT)
        return samples

    def _drain(self, number: int, found: list[Sample], count: int, patience: float | None) -> None:
        """Add what there is at the offsets that are put off, until there are so many samples."""
        spans, partition = self._put_off[number], self._partition(number)
        while spans and len(found) < count:
            span = spans[0]
            samples = self._samples(number, span.low, span.high, patience)
            found.extend(itertools.islice(samples, count - len(found)))
            span.low = partition.next
            if span.low < span.high:
                return
            spans.popleft()

    def _others_have(self, place: Place, block: int) -> bool:
        """Return whether another partition has a message that comes later in the order than this place."""
        (number, _, high), numbers = place, self._numbers
        row = (high - 1 - self._first.get(number, 0)) // block
        turns = row * len(numbers) + (numbers.index(number) - self._turn) % len(numbers) + 1
        return any(
            self._partition(other).end > self._offset(other, turns, block)
            for other in numbers
            if other != number
        )

    def state_dict(self) -> dict[str, Any]:
        """The offsets that are put off, by partition; see `idle`."""
        return {str(n): [[s.low, s.high] for s in spans] for n, spans in self._put_off.items()}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """The opposite. Partitions that are not read any more are left out."""
        self._put_off.clear()
        for number, spans in state.items():
            if int(number) in self._start or self.finds_partitions:
                self._put_off[int(number)].extend(_Span(*span) for span in spans)

    def _partition(self, number: int) -> Partition:
        if number not in self._partitions:
            self._partitions[number] = self._open(number)
        return self._partitions[number]

    def _samples(
        self, partition: int, low: int, high: int, patience: float | None = None
    ) -> Iterator[Sample]:
        """The samples at these offsets, until there is no message for so long."""
        for message in self._partition(partition).messages(low, high, self._lost, patience):
            value = message.value()
            place = f"{self._topic} partition {partition} offset {message.offset()}"
            try:
                yield sample_of(self.features, self.labels, self._parsed(value)), place
            except ValueError as error:
                self._bad(f"{place}: {error}; the message is {value!r:.80}", 1)

    def _parsed(self, value: bytes | None) -> Any:
        """The mapping of a message.

        Raises:
            ValueError: There is none, whatever the parser finds wrong with it.
        """
        if value is None:  # a tombstone, with which a compacted topic deletes a key
            raise ValueError("it has no value")
        try:
            return self._parse(value)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def _lost(self, partition: int, low: int, high: int) -> None:
        """The broker no longer has these offsets."""
        self._bad(
            f"{self._topic} partition {partition} lacks the offsets {low} to {high - 1}", high - low
        )

    def _bad(self, text: str, count: int) -> None:
        if not self._skips:
            raise UsageError(f"{text}; correct it, or set bad_messages='skip'") from None
        self.skipped += count
        self._said += 1
        if self._said <= _SAID:
            more = "; more such lines are left out" if self._said == _SAID else ""
            _log.warning(f"psfleet: {text}; it is skipped{more}")

    def close(self) -> None:
        """End the connections; reading opens them again."""
        while self._partitions:
            number, partition = self._partitions.popitem()
            LAGS.pop(f"{self._topic}/{number}", None)
            partition.close()


def _check(
    start: Mapping[int, int], end: Mapping[int, int] | None, settings: Mapping[str, Any]
) -> None:
    if not start or min(start) < 0 or min(start.values()) < 0:
        raise ConfigError(
            f"start is {start!r}; it must give the first offset, at least 0, of a partition"
        )
    if end is not None and (
        end.keys() != start.keys() or any(end[p] < first for p, first in start.items())
    ):
        raise ConfigError(
            f"end is {end!r}; it must give each partition of {start!r} an offset behind that"
        )
    if end is not None and end == start:
        raise ConfigError(f"end and start are {end!r}; there is no message between them")
    for name in sorted(_FOREIGN & settings.keys()):
        raise ConfigError(f"settings have {name!r}, which psfleet sets itself; leave it out")
