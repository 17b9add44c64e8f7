"""A Kafka broker: the one that librdkafka brings, in threads of the process that starts it."""

import itertools
from collections.abc import Sequence
from typing import Any

import confluent_kafka as kafka


class Broker:
    """Topics are made when they are first written to. It ends with its `with` block.

    Attributes:
        servers: Its address, on loopback.
    """

    def __init__(self) -> None:
        self._producer: Any = kafka.Producer(
            {"test.mock.num.brokers": 1, "bootstrap.servers": "", "linger.ms": 0}
        )
        [broker] = self._producer.list_topics(timeout=60).brokers.values()
        self.servers = f"{broker.host}:{broker.port}"

    def __enter__(self) -> "Broker":
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.flush()
        del self._producer

    def send(
        self, topic: str, partition: int, values: Sequence[bytes | None], times: Sequence[int] = ()
    ) -> None:
        """Append messages, and wait until the broker has them.

        Args:
            times: Their timestamps in milliseconds; none: now.
        """
        failed = []
        for value, time in itertools.zip_longest(values, times, fillvalue=0):
            self._producer.produce(
                topic,
                value,
                partition=partition,
                timestamp=time,
                on_delivery=lambda error, _: failed.append(error),
            )
        assert self._producer.flush(60) == 0
        assert failed == [None] * len(values)
