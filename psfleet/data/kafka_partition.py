"""Reading of one partition of a Kafka topic, at offsets that the caller chooses.

A thin layer over confluent_kafka's Consumer, which fetches messages ahead in its own threads. The partition
is assigned and not subscribed to, so there is no consumer group and nothing is committed. Not every offset
has a message: transactions and compaction leave gaps, and the broker deletes old messages. Some errors are
ignored because the client then connects again by itself. Any other error is a UsageError.

Importing this module without the package `confluent-kafka` raises an error that says how to install it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from time import monotonic, sleep
from typing import Any

from psfleet.core.base.errors import ConfigError, UsageError, not_installed
from psfleet.core.base.logs import log_of

_log = log_of(__name__)

try:
    import confluent_kafka as kafka
except ModuleNotFoundError as error:
    if error.name != "confluent_kafka":
        raise
    raise not_installed("Kafka topics need", "confluent-kafka", "kafka") from None

_WAIT = (
    0.1  # seconds of one wait for messages; an interrupt (Ctrl-C) is only noticed between two waits
)
_AT_ONCE = 1000  # messages that are taken from the client at once
_QUIET = 30.0  # seconds without a message after which a log line says that reading waits
_ASK = 10.0  # seconds for the broker to reply


_PASSING = {
    kafka.KafkaError._TRANSPORT,
    kafka.KafkaError._ALL_BROKERS_DOWN,
    kafka.KafkaError._TIMED_OUT,
    kafka.KafkaError._RESOLVE,
}
"""Errors that are ignored, because the client then connects again by itself."""


class Partition:
    """Reader of one partition, which yields messages at requested offsets.

    Args:
        settings: All settings of librdkafka.

    Attributes:
        next: Offset at which reading can continue, as all messages before it were yielded. -1 before the
            first read.

    Raises:
        ConfigError: A setting is unknown or has a value that librdkafka does not accept.
    """

    def __init__(self, topic: str, settings: Mapping[str, Any], number: int) -> None:
        self._topic = topic
        self._number = number
        try:
            self._consumer = kafka.Consumer(dict(settings))
        except kafka.KafkaException as error:
            raise ConfigError(f"settings of topic {topic!r}: {error.args[0].str()}") from None
        self.next = -1
        self._held: deque[Any] = deque()
        self._latest = monotonic()  # time of the last message
        self._is_idle = False  # True after a log line that no messages come, until a message comes

    @property
    def lag(self) -> int:
        """Number of offsets in the broker that have not been read. Known to the client without a call."""
        _, end = self._consumer.get_watermark_offsets(self._place(), cached=True)
        return max(end - self.next, 0) if self.next >= 0 else 0

    @property
    def end(self) -> int:
        """Offset after the last message. Each access calls the broker. 0 if the broker does not reply."""
        try:
            _, end = self._consumer.get_watermark_offsets(self._place(), timeout=_ASK)
        except kafka.KafkaException:
            return 0
        return int(end)

    def count(self) -> int:
        """Return the topic's number of partitions, which the broker is asked for, or 0 if the broker does
        not reply.
        """
        try:
            return len(self._consumer.list_topics(self._topic, _ASK).topics[self._topic].partitions)
        except kafka.KafkaException:
            return 0

    def say_idle(self) -> None:
        """Log that reading continues without this partition. Logs once until the partition has messages
        again.
        """
        self._say("the order goes on without it, and its messages come as soon as they are there")

    def _say(self, text: str) -> None:
        if not self._is_idle:
            self._is_idle = True
            quiet = monotonic() - self._latest
            _log.warning(
                f"psfleet: {self._topic} partition {self._number} has had no message for {quiet:.1f} s at "
                f"offset {self.next}: {text}"
            )

    def messages(
        self,
        low: int,
        high: int,
        note_lost: Callable[[int, int, int], None],
        patience: float | None = None,
    ) -> Iterator[Any]:
        """Yield the messages at the offsets `low` to `high` - 1. Some offsets have no message.

        Args:
            low: First offset. Continuing from `next` is cheap; any other offset makes the client fetch again.
            high: Offset to stop before.
            note_lost: Function that is called for messages that the broker has deleted: with the number of
                the partition, the first offset, and the offset after the last.
            patience: Number of seconds without a message after which to return early. None waits for all
                messages.
        """
        if low != self.next:
            self._seek(low)
        while self.next < high:
            if not self._held:
                quiet = monotonic() - self._latest
                is_idle = patience is not None and quiet >= patience
                self._held.extend(self._consumer.consume(_AT_ONCE, 0 if is_idle else _WAIT))
                if any(event.error() is None for event in self._held):
                    self._note_message()
                elif is_idle and not self._held:
                    return
                elif patience is None and quiet >= _QUIET:
                    self._say("the order waits for it; with idle=SECONDS it would go on without")
            elif self._held[0].error() is not None:
                self._handle(self._held.popleft(), high, note_lost)
            elif self._held[0].offset() >= high:
                self.next = high
            else:
                message = self._held.popleft()
                self.next = message.offset() + 1
                yield message

    def _note_message(self) -> None:
        if self._is_idle:
            _log.info(f"psfleet: {self._topic} partition {self._number} has messages again")
        self._latest, self._is_idle = monotonic(), False

    def _place(self) -> Any:
        return kafka.TopicPartition(self._topic, self._number)

    def _seek(self, offset: int) -> None:
        self._held.clear()
        self.next = offset
        self._consumer.assign([kafka.TopicPartition(self._topic, self._number, offset)])

    def _handle(self, event: Any, high: int, note_lost: Callable[[int, int, int], None]) -> None:
        """Handle an event of the client that is not a message: the end of the partition, or an error."""
        error = event.error()
        if error.code() == kafka.KafkaError._PARTITION_EOF:
            # The offsets before the end of the partition may have no message, as after a transaction. Count
            # them as read.
            self.next = max(self.next, min(event.offset(), high))
        elif error.code() in (
            kafka.KafkaError._AUTO_OFFSET_RESET,
            kafka.KafkaError.OFFSET_OUT_OF_RANGE,
        ):
            self._find_again(high, note_lost)
        elif not (error.retriable() or error.code() in _PASSING):
            raise UsageError(
                f"{self._topic} partition {self._number} cannot be read at offset {self.next}: "
                f"{error.str()}"
            )

    def _find_again(self, high: int, note_lost: Callable[[int, int, int], None]) -> None:
        """Skip offsets that the broker has deleted, or wait for offsets that do not exist yet.

        The client reports both cases as the same error.
        """
        topic_partition, begin = self._place(), self.next
        try:
            first, _ = self._consumer.get_watermark_offsets(topic_partition, timeout=60)
        except kafka.KafkaException:
            first = begin
        next_offset = max(begin, min(first, high))
        if next_offset == begin:
            sleep(_WAIT)
        self._seek(next_offset)
        if next_offset > begin:
            note_lost(self._number, begin, next_offset)

    def close(self) -> None:
        self._consumer.close()
