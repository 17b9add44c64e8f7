"""One partition of a Kafka topic, read by offsets."""

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

_WAIT = 0.1  # seconds until an interrupt is noticed
_AT_ONCE = 1000  # messages that are taken at once
_QUIET = 30.0  # seconds of waiting for a message of which a line is printed
_ASK = 10.0  # seconds for the broker to answer


_PASSING = {
    kafka.KafkaError._TRANSPORT,
    kafka.KafkaError._ALL_BROKERS_DOWN,
    kafka.KafkaError._TIMED_OUT,
    kafka.KafkaError._RESOLVE,
}
"""Errors after which the client connects again by itself."""


class Partition:
    """Messages of one partition, by their offsets.

    Attributes:
        next: Every message before this offset is handed out; -1: nothing is read yet.
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
        self._latest = monotonic()  # when the last message came
        self._is_idle = False  # a line has said so

    @property
    def lag(self) -> int:
        """Number of offsets that the broker has beyond those that were read, as far as the client knows."""
        _, end = self._consumer.get_watermark_offsets(self._place(), cached=True)
        return max(end - self.next, 0) if self.next >= 0 else 0

    @property
    def end(self) -> int:
        """The offset behind the last message, as the broker says now; 0: it does not answer."""
        try:
            _, end = self._consumer.get_watermark_offsets(self._place(), timeout=_ASK)
        except kafka.KafkaException:
            return 0
        return int(end)

    def count(self) -> int:
        """Number of partitions of the topic, as the broker says now; 0: it does not answer."""
        try:
            return len(self._consumer.list_topics(self._topic, _ASK).topics[self._topic].partitions)
        except kafka.KafkaException:
            return 0

    def say_idle(self) -> None:
        """Say once that the order goes on without the partition."""
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
        """The messages from offset `low` to `high` - 1; some offsets of a topic have none.

        Args:
            note_lost: Called with the partition and the offsets that the broker has deleted.
            patience: Seconds without a message after which there are no more now; None: wait for all.
        """
        if low != self.next:
            self._seek(low)
        while self.next < high:
            if not self._held:
                quiet = monotonic() - self._latest
                is_idle = patience is not None and quiet >= patience
                self._held.extend(self._consumer.consume(_AT_ONCE, 0 if is_idle else _WAIT))
                if any(each.error() is None for each in self._held):
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
        """An error, or the news that the end of the partition is reached."""
        error = event.error()
        if error.code() == kafka.KafkaError._PARTITION_EOF:
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
        """Go on after the offsets that the broker has deleted; wait for those that it does not have yet."""
        place, begin = self._place(), self.next
        try:
            first, _ = self._consumer.get_watermark_offsets(place, timeout=60)
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
