"""Training on messages of a Kafka topic: KafkaTopic, a source of `fleet.dataset`.

The fleet assigns positions to workers, and a position always means the same offset of the same partition.
Blocks of `batch_size` offsets come from the partitions in turn. Here with 2 partitions and a batch size of
3:

    position     0 1 2 | 3 4 5 | 6 7 8 | 9 ...
    partition      0       1       0     1
    offset       0 1 2 | 0 1 2 | 3 4 5 | 3 ...

So each sample is used exactly as often as the fleet's mode promises, without a consumer group, and a job
that resumes from a snapshot continues at the same offsets. Two options deliberately change this order:
`idle` continues without a partition that has no messages, and `find_partitions` adds partitions after every
128 batches.

`kafka_partition.py` reads one partition. Only one thread at a time uses a topic.
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
from psfleet.core.base.logs import FirstLinesLog, log_of
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

_KIBIBYTES = 16384  # KiB of messages that the client fetches ahead, per partition
_WAIT = 0.1  # seconds between two tries to get a message
_SECTION = 128  # number of batches after which the broker is asked for new partitions
_FOREIGN = {"auto.offset.reset", "bootstrap.servers", "enable.auto.commit", "enable.partition.eof"}


Place = tuple[int, int, int]
"""Range of offsets in a partition: number of the partition, first offset, offset after the last."""
Sample = tuple[dict[str, Any], str]
"""Sample: values of a message by column, and a text with its partition and offset for error messages."""


@dataclass
class _Span:
    """Offsets `low` to `high` - 1 of a partition, which had no message in time and are read later."""

    low: int
    high: int


@checked
class KafkaTopic:
    """Messages of a Kafka topic as samples of a feature set: a source of `fleet.dataset`.

        clicks = KafkaTopic("broker:9092", "clicks", features, ["click"], start={0: 0, 1: 0})
        for batch in fleet.dataset(clicks, batch_size=1024):
            ...

    Each position of the dataset is one offset of one partition, the same for every worker. Blocks of
    `batch_size` offsets come from the partitions in turn. So a snapshot contains the offsets that the job
    has reached, and no consumer group is needed. Reading waits for messages that are not written yet.

    Args:
        servers: Brokers, as HOST:PORT, separated by commas.
        topic: Name of the topic.
        features: Features of a sample. A message is a JSON object that has a value or a list of values for
            each feature, under the name of the feature's column. A column that is absent or null is a
            missing feature.
        labels: Names of the labels in the JSON object.
        start: For each partition to read, by its number, the first offset to read. `find_partitions` adds
            further partitions.
        end: For each partition, the offset to stop before. None reads until the script leaves the loop.
        bad_messages: Treatment of messages that have an unusable value, and of offsets that the broker
            has deleted. "fail" raises UsageError. "skip" leaves them out, counts them in `skipped` and logs
            the first few.
        parse: Function from the bytes of a message to a mapping by column. It raises ValueError for bytes
            that it cannot parse. None parses JSON.
        idle: Number of seconds without a message after which reading continues without a partition, if
            another partition has messages. None waits for each partition. Offsets without a message are
            postponed: they come with a later batch of the same worker, once they have messages. So batches
            may be smaller, and a step with an empty batch is left out. Call `fleet.remember(topic, source)`
            to keep postponed offsets, up to one batch, for a worker that starts again. Cannot be combined
            with `end`.
        find_partitions: True to also read partitions with higher numbers than those in `start`, from offset
            0, including partitions that are created later. The broker is asked after every 128 batches, and
            all workers read a partition that one of the workers has found. Works only in `fleet.dataset`,
            and cannot be combined with `end`.
        settings: Further settings of librdkafka, such as settings for TLS.

    Attributes:
        skipped: Number of messages that this process has left out.
        idle: As passed.

    Raises:
        ConfigError: `start` and `end` do not have the same partitions or have no offset between them, or
            `settings` has a setting that psfleet sets itself.
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
        # A section is a dataset with positions from 0. The next two values say where the section begins in
        # the topic.
        self._first = dict(self._start)  # first offset of each partition in the present section
        self._turn = 0  # number of batches in earlier sections
        self._parts: SourceParts | None = None
        self._put_off: defaultdict[int, deque[_Span]] = defaultdict(deque)
        self._sizes = None if end is None else [end[p] - first for p, first in self._start.items()]
        self._warnings = FirstLinesLog(_log)
        self._order: RowSequence | None = None
        fixed_settings = {
            "bootstrap.servers": servers,
            "group.id": "psfleet",  # the client requires a name; nothing is committed
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "queued.max.messages.kbytes": _KIBIBYTES,
        }
        self._open = functools.partial(Partition, topic, fixed_settings | dict(settings or {}))
        self._topic = topic
        self._partitions: dict[int, Partition] = {}

    def __len__(self) -> int:
        """Return the number of offsets. Without `end`, return the largest possible size of a dataset."""
        return MOST if self._sizes is None else sum(self._sizes)

    def sections(self, batch_size: int) -> Iterator[tuple[int, SourceParts]] | None:
        """Yield the size of each section of 128 batches, and the partitions that all workers read in the
        section.

        Returns None without `find_partitions`.
        """
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
        """Return a partition's first offset that comes after `turns` batches of the present section.

        Of P partitions, number i gets the batches i, i + P, i + 2P, ... of the section (shifted by the
        batches of earlier sections). So it has had ceil((turns - i) / P) batches of `block` offsets each.
        """
        numbers = self._numbers
        block_offset = (numbers.index(number) - self._turn) % len(numbers)
        return self._first.get(number, 0) + -(-max(turns - block_offset, 0) // len(numbers)) * block

    def prepare(
        self, ranges: Sequence[Range], batch_size: int, seed: int | None
    ) -> Callable[[], SampleBatch]:
        """Read the messages at these positions. Waits for messages that are not written yet.

        Unlike in other sources, the samples also depend on the time of the call if `idle` is set.

        Raises:
            UsageError: The topic cannot be read, or a message cannot be used and `bad_messages` is "fail".
        """
        if seed is not None:
            raise UsageError(
                f"shuffle_seed is {seed}; the messages of a topic come in their order, leave it out"
            )
        size = len(self)
        offset_ranges = [
            offsets
            for low, high in ranges
            for offsets in self._places(low % size, low % size + high - low, batch_size)
        ]
        if self.idle is None:
            messages = [sample for offsets in offset_ranges for sample in self._samples(*offsets)]
        else:
            messages = self._present(offset_ranges, batch_size)
        LAGS.update(
            {f"{self._topic}/{n}": partition.lag for n, partition in self._partitions.items()}
        )
        batch = self._batch(messages)
        refused = refused_samples(self.features, batch.features, len(batch)) if self._skips else {}
        # If `bad_messages` is "fail", the lookup itself raises an error for a value that it refuses.
        for number, text in refused.items():
            self._bad(f"{messages[number][1]}: {text}", 1)
        if refused:
            batch = self._batch([message for n, message in enumerate(messages) if n not in refused])
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

    def _present(self, offset_ranges: Sequence[Place], block: int) -> list[Sample]:
        """Return samples of these offsets and of postponed offsets, as far as their messages exist now.

        The number of samples is at most the number of offsets in `offset_ranges`, so that a batch never
        gets larger. Offsets without a message are postponed. The batch is returned incomplete only if two
        conditions hold:

        - the partitions of `offset_ranges` are idle,
        - reading can continue: there is a sample, or another partition has a message that comes later in
          the order.

        If the whole topic has no new messages, the method waits.
        """
        for number, low, high in offset_ranges:
            self._put_off[number].append(_Span(low, high))
        own_partitions, count = (
            {offsets[0] for offsets in offset_ranges},
            sum(high - low for _, low, high in offset_ranges),
        )
        samples: list[Sample] = []
        while count:
            for number in tuple(self._put_off):
                self._drain(number, samples, count, self.idle if number in own_partitions else 0.0)
            late = [number for number in own_partitions if self._put_off[number]]
            if len(samples) == count or not any(self._put_off.values()):
                break
            if samples or self._others_have(offset_ranges[-1], block):
                for number in late:
                    self._partition(number).say_idle()
                break
            sleep(_WAIT)
        return samples

    def _drain(
        self, number: int, samples_so_far: list[Sample], count: int, patience: float | None
    ) -> None:
        """Read postponed offsets of a partition into `samples_so_far`, until this has `count` samples.

        Offsets that have no message after `patience` seconds stay postponed.
        """
        spans, partition = self._put_off[number], self._partition(number)
        while spans and len(samples_so_far) < count:
            span = spans[0]
            samples = self._samples(number, span.low, span.high, patience)
            samples_so_far.extend(itertools.islice(samples, count - len(samples_so_far)))
            # Shorten the span from its start, even if only some of its messages exist.
            span.low = partition.next
            if span.low < span.high:
                return
            spans.popleft()

    def _others_have(self, offsets: Place, block: int) -> bool:
        """Return True if another partition has messages that would come later in the order of the topic.

        This partition then holds the other partitions back.

        Args:
            offsets: Partition, first offset and end of the block that has no messages yet.
            block: Number of offsets that are read from each partition in turn.
        """
        (number, _, high), numbers = offsets, self._numbers
        row = (high - 1 - self._first.get(number, 0)) // block
        turns = row * len(numbers) + (numbers.index(number) - self._turn) % len(numbers) + 1
        return any(
            self._partition(other_number).end > self._offset(other_number, turns, block)
            for other_number in numbers
            if other_number != number
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the ranges of postponed offsets (argument `idle`), by the partition's number as text."""
        return {str(n): [[s.low, s.high] for s in spans] for n, spans in self._put_off.items()}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Set the postponed offsets. Partitions that are no longer read are ignored."""
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
        """Yield the samples at these offsets, until no message has come for `patience` seconds."""
        for message in self._partition(partition).messages(low, high, self._lost, patience):
            value = message.value()
            message_position = f"{self._topic} partition {partition} offset {message.offset()}"
            try:
                yield sample_of(self.features, self.labels, self._parsed(value)), message_position
            except ValueError as error:
                self._bad(f"{message_position}: {error}; the message is {value!r:.80}", 1)

    def _parsed(self, value: bytes | None) -> Any:
        """Parse the content of a message to a mapping by column.

        Raises:
            ValueError: The message has no content, or the parser raised any error.
        """
        if value is None:  # a tombstone, which deletes a key of a compacted topic
            raise ValueError("it has no value")
        try:
            return self._parse(value)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def _lost(self, partition: int, low: int, high: int) -> None:
        """Count offsets that the broker has deleted before they were read, or raise an error for them."""
        self._bad(
            f"{self._topic} partition {partition} lacks the offsets {low} to {high - 1}", high - low
        )

    def _bad(self, text: str, count: int) -> None:
        if not self._skips:
            raise UsageError(f"{text}; correct it, or set bad_messages='skip'") from None
        self.skipped += count
        self._warnings.say(f"psfleet: {text}; it is skipped")

    def close(self) -> None:
        """Close the connections to the brokers. A later read opens new connections."""
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
