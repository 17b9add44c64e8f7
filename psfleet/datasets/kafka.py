"""Messages of a Kafka topic as samples, which fleet.dataset hands out to the workers.

clicks = KafkaTopic("broker:9092", "clicks", features, ["click"], start={0: 0, 1: 0})
for batch in fleet.dataset(clicks, batch_size=1024):
    values = embed(batch.features)
    loss = loss_fn(values, batch.labels["click"])
"""

import functools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import sleep
from typing import Any, Literal

from psfleet.data.assignment import MOST, Range
from psfleet.datasets.mapped_samples import batch_of, sample_of, time_of
from psfleet.datasets.row_order import RowRange, RowSequence
from psfleet.datasets.sample_batch import SampleBatch
from psfleet.errors import ConfigError, UsageError
from psfleet.feature_sets.feature_set import FeatureSet
from psfleet.platform.notices import say
from psfleet.validation.annotations import checked

try:
    import confluent_kafka as kafka
except ModuleNotFoundError as error:
    if error.name != "confluent_kafka":
        raise
    raise ConfigError(
        "Kafka topics need confluent-kafka, which is not installed; run: pip install psfleet[kafka]"
    ) from None

__all__ = ["KafkaTopic"]

_SAID = 5  # bad messages of which a line is printed
_WAIT = 0.1  # seconds until an interrupt is noticed
_AT_ONCE = 1000  # messages that are taken at once
_KIBIBYTES = 16384  # of messages that the client fetches ahead, per partition
_FOREIGN = {"auto.offset.reset", "bootstrap.servers", "enable.auto.commit", "enable.partition.eof"}

Place = tuple[int, int, int]
"""A partition, the first of its offsets, and the one behind the last."""


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
        start: By partition the first offset to read. Other partitions are not read.
        end: By partition the offset to stop before; None: go on until the script leaves the loop.
        bad_messages: What happens to a message with a value that cannot be used, and to offsets that the
            broker has deleted: "fail", or "skip" it, which is counted in `skipped` and reported on standard
            error.
        parse: Makes the mapping of a message's value; None: JSON. ValueError: it cannot.
        time: Name of the whole number in the object that says when the sample happened, for
            `SampleBatch.times` and `EventTimeSequence`; None: the message's own timestamp, in milliseconds.
        settings: More settings of librdkafka, such as those for TLS.

    Attributes:
        skipped: How many messages this process has skipped.

    Raises:
        ConfigError: The offsets do not fit each other, or a setting is psfleet's own.
    """

    waits = True

    @checked
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
        time: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        _check(start, end, settings or {})
        self.features = features
        self.labels = list(labels)
        self.skipped = 0
        self._skips = bad_messages == "skip"
        self._parse = parse or json.loads
        self._time = time
        self._start = dict(sorted(start.items()))
        self._numbers = list(self._start)
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
        self._open = functools.partial(_Partition, topic, own | dict(settings or {}))
        self._topic = topic
        self._partitions: dict[int, _Partition] = {}

    def __len__(self) -> int:
        """The number of offsets; without an end as many as a dataset may have."""
        return MOST if self._sizes is None else sum(self._sizes)

    def prepare(
        self, ranges: Sequence[Range], batch_size: int, seed: int | None
    ) -> Callable[[], SampleBatch]:
        """See OrderedSource.prepare.

        Raises:
            UsageError: The topic cannot be read; a message cannot be used, and bad messages are to fail.
        """
        if seed is not None:
            raise UsageError(
                f"shuffle_seed is {seed}; the messages of a topic come in their order, leave it out"
            )
        found: list[tuple[dict[str, Any], int]] = []
        for low, high in ranges:
            for place in self._places(low % len(self), low % len(self) + high - low, batch_size):
                found += self._samples(*place)
        samples, times = [sample for sample, _ in found], [time for _, time in found]
        return functools.partial(batch_of, self.features, self.labels, samples, times)

    def _places(self, low: int, high: int, block: int) -> Iterator[Place]:
        """The offsets at these positions."""
        for found in self._ranges(low, high, block):
            partition = self._numbers[found.group]
            first = self._start[partition]
            yield partition, first + found.low, first + found.high

    def _ranges(self, low: int, high: int, block: int) -> Iterator[RowRange]:
        if self._sizes is not None:
            count = len(self._sizes)
            self._order = self._order or RowSequence(self._sizes, block, count, None, 0)
            yield from self._order.ranges(low, high)
            return
        while low < high:
            turn, skip = divmod(low, block)
            row, partition = divmod(turn, len(self._numbers))
            count = min(block - skip, high - low)
            yield RowRange(partition, row * block + skip, row * block + skip + count)
            low += count

    def _samples(self, partition: int, low: int, high: int) -> Iterator[tuple[dict[str, Any], int]]:
        """The samples at these offsets, each with its time."""
        if partition not in self._partitions:
            self._partitions[partition] = self._open(partition)
        for message in self._partitions[partition].messages(low, high, self._lost):
            value = message.value()
            try:
                given = self._parse(value)
                sample = sample_of(self.features, self.labels, given)
                time = message.timestamp()[1] if self._time is None else time_of(self._time, given)
                yield sample, time
            except ValueError as error:
                place = f"{self._topic} partition {partition} offset {message.offset()}"
                self._bad(f"{place}: {error}; the message is {value!r:.80}", 1)

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
            say(f"psfleet: {text}; it is skipped{more}")

    def close(self) -> None:
        """End the connections; reading opens them again."""
        while self._partitions:
            self._partitions.popitem()[1].close()


class _Partition:
    """Messages of one partition, by their offsets."""

    def __init__(self, topic: str, settings: Mapping[str, Any], number: int) -> None:
        self._topic = topic
        self._number = number
        try:
            self._consumer = kafka.Consumer(dict(settings))
        except kafka.KafkaException as error:
            raise ConfigError(f"settings of topic {topic!r}: {error.args[0].str()}") from None
        self._next = -1  # every message before this offset is handed out
        self._held: deque[Any] = deque()

    def messages(self, low: int, high: int, lost: Callable[[int, int, int], None]) -> Iterator[Any]:
        """The messages from offset `low` to `high` - 1; some offsets of a topic have none.

        Args:
            lost: Is told the partition and the offsets that the broker has deleted.
        """
        if low != self._next:
            self._seek(low)
        while self._next < high:
            if not self._held:
                self._held.extend(self._consumer.consume(_AT_ONCE, _WAIT))
            elif self._held[0].error() is not None:
                self._handle(self._held.popleft(), high, lost)
            elif self._held[0].offset() >= high:
                self._next = high
            else:
                message = self._held.popleft()
                self._next = message.offset() + 1
                yield message

    def _seek(self, offset: int) -> None:
        self._held.clear()
        self._next = offset
        self._consumer.assign([kafka.TopicPartition(self._topic, self._number, offset)])

    def _handle(self, event: Any, high: int, lost: Callable[[int, int, int], None]) -> None:
        """An error, or the news that the end of the partition is reached."""
        error = event.error()
        if error.code() == kafka.KafkaError._PARTITION_EOF:
            self._next = max(self._next, min(event.offset(), high))
        elif error.code() in (
            kafka.KafkaError._AUTO_OFFSET_RESET,
            kafka.KafkaError.OFFSET_OUT_OF_RANGE,
        ):
            self._find_again(high, lost)
        elif not (error.retriable() or error.code() in _PASSING):
            raise UsageError(
                f"{self._topic} partition {self._number} cannot be read at offset {self._next}: "
                f"{error.str()}"
            )

    def _find_again(self, high: int, lost: Callable[[int, int, int], None]) -> None:
        """Go on after the offsets that the broker has deleted; wait for those that it does not have yet."""
        place, begin = kafka.TopicPartition(self._topic, self._number), self._next
        try:
            first, _ = self._consumer.get_watermark_offsets(place, timeout=60)
        except kafka.KafkaException:
            first = begin
        gone = max(begin, min(first, high))
        if gone == begin:
            sleep(_WAIT)
        self._seek(gone)
        if gone > begin:
            lost(self._number, begin, gone)

    def close(self) -> None:
        self._consumer.close()


_PASSING = {
    kafka.KafkaError._TRANSPORT,
    kafka.KafkaError._ALL_BROKERS_DOWN,
    kafka.KafkaError._TIMED_OUT,
    kafka.KafkaError._RESOLVE,
}
"""Errors after which the client connects again by itself."""


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
