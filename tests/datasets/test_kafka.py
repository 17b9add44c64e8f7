"""Messages of a Kafka topic as samples: their order, bad messages, and a job that dies."""

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from psfleet import fleet
from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.runtime import dataset_pass
from psfleet.data.batches import Batches
from psfleet.features import Feature, FeatureSet, Log1p, Normalize, Number

pytest.importorskip(
    "confluent_kafka", reason="confluent-kafka is not installed: pip install psfleet[kafka]"
)

from psfleet.core.base.observability.logged_values import LAGS
from psfleet.data import kafka, kafka_partition  # after the check for confluent-kafka
from psfleet.data.kafka import KafkaTopic
from psfleet_worker.worker_metrics import StepTimes, WorkerMetrics
from tests import waiting
from tests.datasets.broker import Broker
from tests.datasets.click_features import FEATURES, TABLE


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """A broker with topics of the tests."""
    with Broker() as started:
        yield started


def message(click: Any, **changed: Any) -> bytes:
    """A message whose label is `click`."""
    row = {"user": 7, "tags": [1, 2], "tags.weights": [0.5, 2], "city": "x", "age": [1, 2]}
    return json.dumps(row | {"click": click} | changed).encode()


def clicks(batches: Any) -> list[list[int]]:
    """The labels of each batch."""
    return [batch.labels["click"].astype(int).tolist() for batch in batches]


def filled(broker: Broker, name: str, sizes: list[int]) -> None:
    """A topic with so many messages in each partition; those of partition p begin with 100 p."""
    for partition, size in enumerate(sizes):
        broker.send(name, partition, [message(100 * partition + row) for row in range(size)])


def test_columns(broker: Broker) -> None:
    """A sample has the features of its message; what a message lacks is missing."""
    broker.send("columns", 0, [message(1), json.dumps({"user": [3, 4], "click": 0}).encode()])
    source = KafkaTopic(broker.servers, "columns", FEATURES, ["click"], start={0: 0}, end={0: 2})
    (batch,) = fleet.dataset(source, 2)
    source.close()
    assert batch.labels["click"].tolist() == [1, 0]
    assert batch.features["user"].values.tolist() == [7, 3, 4]
    assert batch.features["user"].lengths.tolist() == [1, 2]
    assert batch.features["tags"].weights.tolist() == [0.5, 2]
    assert batch.features["city"].values.tolist() == ["x"]
    assert batch.features["age"].tolist() == [[1, 2], [-1, -1]]


def test_partitions_come_in_turn(broker: Broker) -> None:
    """Blocks come from the partitions in turn, and whoever asks for positions gets the same messages."""
    filled(broker, "turns", [7, 5])
    source = KafkaTopic(
        broker.servers, "turns", FEATURES, ["click"], start={0: 1, 1: 0}, end={0: 7, 1: 5}
    )
    order = clicks(fleet.dataset(source, 2))
    assert order == [[1, 2], [100, 101], [3, 4], [102, 103], [5, 6], [104]]
    for low, high in ((4, 6), (0, 3), (3, 11)):
        (part,) = clicks([source.prepare([(low, high)], 2, None)()])
        assert part == [click for block in order for click in block][low:high]
    source.close()


def test_a_topic_without_end(broker: Broker) -> None:
    """Without an end the loop goes on with the messages that come, until the script leaves it."""
    filled(broker, "endless", [2, 2])
    source = KafkaTopic(broker.servers, "endless", FEATURES, ["click"], start={0: 0, 1: 0})
    batches = iter(fleet.dataset(source, 2, prefetch=2))
    assert clicks([next(batches), next(batches)]) == [[0, 1], [100, 101]]
    broker.send("endless", 0, [message(2), message(3)])
    assert clicks([next(batches)]) == [[2, 3]]
    source.close()


def test_messages_to_come(broker: Broker) -> None:
    """Who asks for offsets that are yet to come, as a worker may that is ahead of others, waits for them."""
    filled(broker, "coming", [2])
    source = KafkaTopic(broker.servers, "coming", FEATURES, ["click"], start={0: 0})
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(lambda: source.prepare([(4, 6)], 2, None)())
        broker.send("coming", 0, [message(row) for row in range(2, 6)])
        assert clicks([future.result()]) == [[4, 5]]
    source.close()


def test_a_partition_with_less_traffic(broker: Broker, capsys: Any) -> None:
    """The order goes on without an idle partition while others have messages, and says so; what is put off
    comes when it is there. No message is lost or doubled, and no batch is empty or too large."""
    filled(broker, "idle", [6, 3])
    source = KafkaTopic(broker.servers, "idle", FEATURES, ["click"], start={0: 0, 1: 0}, idle=0.05)
    batches = iter(fleet.dataset(source, 2))
    assert together(batches, 9) == [*range(6), 100, 101, 102]
    broker.send("idle", 1, [message(103), message(104), message(105)])
    broker.send("idle", 0, [message(row) for row in range(6, 12)])
    assert together(batches, 9) == [*range(6, 12), 103, 104, 105]
    output = capsys.readouterr().err
    assert "idle partition 1 has had no message for " in output
    assert "the order goes on without it" in output
    assert "idle partition 1 has messages again" in output
    assert LAGS["idle/0"] == LAGS["idle/1"] == 0
    source.close()


def test_lag(broker: Broker) -> None:
    """A worker tells of each partition how many messages are behind those that it has read."""
    filled(broker, "lag", [7, 5])
    source = KafkaTopic(broker.servers, "lag", FEATURES, ["click"], start={0: 0, 1: 0})
    source.prepare([(0, 6)], 2, None)()
    metrics = WorkerMetrics(StepTimes(), lambda: 0)
    metrics.wanted = True
    text = metrics.text().decode()
    assert 'psfleet_topic_lag{partition="lag/0"} 3.0' in text
    assert 'psfleet_topic_lag{partition="lag/1"} 3.0' in text
    source.close()
    assert b"lag/" not in metrics.text()


def together(batches: Iterator[Any], count: int) -> list[int]:
    """So many labels in order; how they come in batches of at most 2 depends on the time."""
    numbers: list[int] = []
    while len(numbers) < count:
        (batch,) = clicks([next(batches)])
        assert 1 <= len(batch) <= 2
        numbers += batch
    return sorted(numbers)


def test_what_is_put_off_is_remembered(broker: Broker) -> None:
    """A source that gets the state of another one reads what that had put off, and nothing twice."""
    filled(broker, "kept", [6, 1])
    options: dict[str, Any] = {"start": {0: 0, 1: 0}, "idle": 0.05}
    first = KafkaTopic(broker.servers, "kept", FEATURES, ["click"], **options)
    (actual,) = clicks([first.prepare([(2, 8)], 2, None)()])
    kept = json.loads(json.dumps(first.state_dict()))
    put_off = [
        100 * int(number) + offset
        for number, spans in kept.items()
        for low, high in spans
        for offset in range(low, high)
    ]
    assert {101, 102, 103} <= {*put_off}
    assert sorted(actual + put_off) == [2, 3, 100, 101, 102, 103]
    second = KafkaTopic(broker.servers, "kept", FEATURES, ["click"], **options)
    second.set_state_dict(kept)
    broker.send("kept", 1, [message(101), message(102), message(103)])
    low = 8
    while len(actual) < 8:
        actual += clicks([second.prepare([(low, low + 2)], 2, None)()])[0]
        low += 2
    assert sorted(actual) == [2, 3, 4, 5, 100, 101, 102, 103]
    first.close()
    second.close()


def test_new_partitions(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that the broker has when a section of batches begins is read from its first message on, in
    turn with the others, one that it has later from the next section on; a second loop begins again."""
    monkeypatch.setattr(kafka, "_SECTION", 3)
    filled(broker, "found", [9, 6, 4, 0])  # a topic of this broker has four partitions
    seen = itertools.chain([2, 3, 3, 2], itertools.repeat(3))
    monkeypatch.setattr(kafka_partition.Partition, "count", lambda _: next(seen))
    source = KafkaTopic(
        broker.servers, "found", FEATURES, ["click"], start={0: 1}, find_partitions=True
    )
    batches = iter(fleet.dataset(source, 2))
    assert clicks([next(batches) for _ in range(7)]) == [
        [1, 2],
        [100, 101],
        [3, 4],
        [5, 6],  # the turn of partition 0 again: three batches before it
        [102, 103],
        [200, 201],
        [7, 8],
    ]
    batches = iter(fleet.dataset(source, 2))
    assert clicks([next(batches) for _ in range(2)]) == [[1, 2], [100, 101]]
    source.close()


def test_partitions_are_counted(broker: Broker) -> None:
    """The broker says how many partitions a topic has; one that cannot be reached says nothing."""
    filled(broker, "counted", [1])
    source = KafkaTopic(
        broker.servers, "counted", FEATURES, ["click"], start={0: 0}, find_partitions=True
    )
    sections = source.sections(2)
    assert sections is not None
    assert next(sections)[1].count == 4
    source.close()


def test_new_partitions_beside_idle_ones(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an idle time a new partition without messages holds nothing back, and what it gets comes later."""
    monkeypatch.setattr(kafka, "_SECTION", 4)
    filled(broker, "both", [12, 1])
    options: dict[str, Any] = {"start": {0: 0}, "idle": 0.05, "find_partitions": True}
    source = KafkaTopic(broker.servers, "both", FEATURES, ["click"], **options)
    batches = iter(fleet.dataset(source, 2))
    assert together(batches, 13) == [*range(12), 100]
    broker.send("both", 1, [message(101)])
    broker.send("both", 3, [message(300)])
    broker.send("both", 0, [message(row) for row in range(12, 30)])
    assert together(batches, 20) == [*range(12, 30), 101, 300]
    assert {int(number) for number in source.state_dict()} == {0, 1, 2, 3}
    source.close()


def test_waiting_is_said(broker: Broker, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an idle time the order waits, and a line says for which partition."""
    monkeypatch.setattr(kafka_partition, "_QUIET", 0.0)
    filled(broker, "said", [2, 1])
    source = KafkaTopic(broker.servers, "said", FEATURES, ["click"], start={0: 0, 1: 0})
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(lambda: source.prepare([(0, 4)], 2, None)())
        waiting.until(lambda: "at offset 1: the order waits for it" in capsys.readouterr().err)
        broker.send("said", 1, [message(101)])
        assert clicks([future.result()]) == [[0, 1, 100, 101]]
    source.close()


BAD: list[tuple[bytes | None, str]] = [
    (b"no json", "Expecting value"),
    (b"[1]", "it is a list, not an object with columns"),
    (message(None), "click is None"),
    (message(True, user="u"), "user is 'u'"),
    (message(1, user=2**63), "user is 9223372036854775808"),
    (message(1, tags=[1, 0.5]), r"tags is \[1, 0.5\]"),
    (message(1, **{"tags.weights": [1]}), r"tags.weights is \[1\]"),
    (message(1, **{"tags.weights": None}), "tags.weights is None for 2 ids"),
    (message(1, age=[1]), r"age is \[1\]"),
    (message(float("inf")), "click is inf"),
    (message(float("nan")), "click is nan"),
    (message(10**400), "click is 1000"),
    (message(1, city="shoes \ud83d"), r"city is 'shoes \\ud83d'"),
    (message(1, city="shoes").replace(b"shoes", b"\xff"), "'utf-8' codec can't decode"),
    (b"[" * 100_000, "RecursionError"),
    (None, "it has no value"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_messages(broker: Broker, capsys: Any, case: int) -> None:
    """A bad message is refused, or skipped and counted, with topic, partition, offset and value."""
    value, text = BAD[case]
    name = f"bad{case}"
    broker.send(name, 0, [message(0), value, message(2)])

    def source(**options: Any) -> KafkaTopic:
        return KafkaTopic(
            broker.servers, name, FEATURES, ["click"], start={0: 0}, end={0: 3}, **options
        )

    failing = source()
    with pytest.raises(
        UsageError, match=rf"^{name} partition 0 offset 1: .*{text}.* is (b[\'\"]|None)"
    ):
        list(fleet.dataset(failing, 3))
    skipping = source(bad_messages="skip")
    assert clicks(fleet.dataset(skipping, 3)) == [[0, 2]]
    assert skipping.skipped == 1
    assert f"{name} partition 0 offset 1: " in capsys.readouterr().err
    failing.close()
    skipping.close()


def test_messages_that_are_refused_later(broker: Broker) -> None:
    """What only a transform refuses, or the parser fails at, costs its message, and no other."""
    features = FeatureSet(
        [Number("price", transform=[Log1p(), Normalize()]), Feature("user", TABLE)]
    )
    prices = [0, -3, 1, "x", 2, -1]
    values = [json.dumps({"price": price, "user": [1, None]}).encode() for price in prices]
    broker.send("late", 0, [*values, b"7"])
    source = KafkaTopic(
        *(broker.servers, "late", features),
        start={0: 0},
        end={0: 7},
        bad_messages="skip",
        parse=lambda value: {name: np.array(v) for name, v in json.loads(value).items()},
    )
    [batch] = Batches(source, 7)  # Normalize is not fitted yet
    assert batch.features["price"].values.tolist() == [0, 1, 2]
    assert batch.features["user"].lengths.tolist() == [1, 1, 1]
    assert source.skipped == 4
    features.fit([batch])
    assert [each.features["price"].values.tolist() for each in Batches(source, 7)] == [[0, 1, 2]]
    source.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"start": {}}, "start is {}"),
        ({"start": {0: -1}}, "start is {0: -1}"),
        ({"start": {0: 1}, "end": {1: 2}}, "end is {1: 2}"),
        ({"start": {0: 3}, "end": {0: 2}}, "end is {0: 2}"),
        ({"start": {0: 3}, "end": {0: 3}}, "there is no message between them"),
        ({"start": {0: 0}, "end": {0: 2}, "idle": 1.0}, "idle is 1.0 for a topic"),
        ({"start": {0: 0}, "end": {0: 2}, "find_partitions": True}, "find_partitions is True"),
        ({"start": {0: 0}, "idle": -1.0}, "idle is -1.0"),
        ({"start": {0: 0}, "settings": {"enable.auto.commit": True}}, "enable.auto.commit"),
    ],
)
def test_refused_arguments(options: Any, text: str) -> None:
    """Offsets that fit no partition, and settings of psfleet's own, are refused with their value."""
    with pytest.raises(ConfigError, match=text):
        KafkaTopic("localhost:1", "t", FEATURES, **options)


def test_shuffling_is_refused(broker: Broker) -> None:
    """A topic has its order."""
    source = KafkaTopic(broker.servers, "t", FEATURES, start={0: 0})
    with pytest.raises(UsageError, match="shuffle_seed is 3"):
        next(iter(fleet.dataset(source, 2, shuffle_seed=3)))


def test_an_idle_time_has_its_limits(broker: Broker) -> None:
    """Merged steps need the order that waits."""
    source = KafkaTopic(broker.servers, "t", FEATURES, start={0: 0}, idle=1.0)
    with pytest.raises(UsageError, match="leave out idle and find_partitions, or pipeline and"):
        next(dataset_pass.batches(source, 2, None, None, merged=2))
