"""Samples in order of their times: exactly, if none is out of order by more than the window."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet import fleet
from psfleet.core.base.errors import UsageError
from psfleet.data.event_time import EventTimeSequence
from psfleet.features import Feature, FeatureSet, Table

FEATURES = FeatureSet([Feature("row", Table("t", 4))])


def files(
    path: Path, times: Any, bad: Sequence[int] = (), group: int = 7, per_file: int = 25
) -> Any:
    """Files with rows of these times; the labels of bad ones are null. A row's id is its number."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")
    import pyarrow as pa
    import pyarrow.parquet as pq

    from psfleet.data.parquet import ParquetFiles

    labels = [None if row in bad else 1.0 for row in range(len(times))]
    columns = {"row": range(len(times)), "label": labels, "at": times}
    table = pa.table(columns | {"label": pa.array(labels, pa.float32())})
    for number, first in enumerate(range(0, len(times), per_file)):
        pq.write_table(table[first : first + per_file], path / f"{number:03}.parquet", group)
    return ParquetFiles(path, FEATURES, ["label"], "skip" if bad else "fail", time="at")


def disordered(count: int, window: int, seed: int) -> Any:
    """Times of which none comes `window` or more places behind a later one; some are equal."""
    dice = np.random.default_rng(seed)
    delayed = np.arange(count) + dice.integers(0, window, count)
    return np.argsort(delayed, kind="stable") // 2


def rows(batches: Any) -> list[int]:
    """The numbers of the rows."""
    return [row for batch in batches for row in batch.features["row"].values.tolist()]


def times(batches: Any) -> list[int]:
    """Their times."""
    return [time for batch in batches for time in batch.times.tolist()]


@pytest.mark.parametrize("count", [1, 40, 47])
@pytest.mark.parametrize("window", [1, 5, 10, 30])
def test_order(tmp_path: Path, count: int, window: int) -> None:
    """Every row comes once an epoch, in order of time; equal times stay in the order of the files."""
    given = disordered(count, window, seed=count)
    source = EventTimeSequence(files(tmp_path, given), window)
    batches = list(fleet.dataset(source, 4, epochs=2))
    expected = np.sort(given).tolist()
    assert times(batches) == expected + expected
    assert rows(batches)[:count] == rows(batches)[count:]
    assert sorted(rows(batches)[:count]) == list(range(count))
    assert [given[row] for row in rows(batches)] == times(batches)
    assert source.late == 0


def test_the_order_depends_on_no_worker(tmp_path: Path) -> None:
    """Whoever reads which positions, in whatever pieces and order, gets the samples at those positions."""
    given = disordered(60, 8, seed=3)
    given[[20, 21, 44]] = 0  # late
    source = EventTimeSequence(files(tmp_path, given), 8, "keep")
    whole = rows([source.prepare([(0, 60)], 4, None)(), source.prepare([(60, 120)], 4, None)()])
    assert whole[:60] == whole[60:]
    for low, high in ((50, 60), (7, 33), (0, 1), (59, 60), (60, 77), (16, 24)):
        again = EventTimeSequence(files(tmp_path, given), 8, "keep")
        assert rows([again.prepare([(low, high)], 4, None)()]) == whole[low:high]
    assert rows([source.prepare([(3, 5), (70, 75)], 4, None)()]) == whole[3:5] + whole[70:75]


def test_bad_rows_leave_the_order_exact(tmp_path: Path) -> None:
    """Where rows are skipped batches are smaller, and the others come in order of time."""
    dice = np.random.default_rng(5)
    given = disordered(90, 9, seed=4)
    bad = sorted(dice.choice(90, 40, replace=False).tolist())
    source = EventTimeSequence(files(tmp_path, given, bad), 9)
    batches = list(fleet.dataset(source, 4))
    assert times(batches) == sorted(given[row] for row in range(90) if row not in bad)
    assert source.late == 0


@pytest.mark.parametrize("late", ["drop", "keep"])
def test_late_samples(tmp_path: Path, late: Any) -> None:
    """A sample that comes more than three windows late is counted, and dropped or kept."""
    given = np.arange(100, 200)
    given[[40, 77]] = [101, 110]
    source = EventTimeSequence(files(tmp_path, given), 5, late)
    batches = list(fleet.dataset(source, 4))
    on_time = sorted(set(range(100)) - {40, 77})
    assert [row for row in rows(batches) if row not in (40, 77)] == on_time
    assert len(rows(batches)) == (98 if late == "drop" else 100)
    assert source.late == 2
    if late == "drop":
        assert times(batches) == sorted(times(batches))


def test_a_time_far_in_the_future(tmp_path: Path) -> None:
    """One wrong clock makes two windows late, and not the rest of the stream."""
    given = np.arange(100)
    given[30] = 10**15
    source = EventTimeSequence(files(tmp_path, given), 5)
    order = rows(fleet.dataset(source, 4))
    assert sorted(set(range(100)) - set(order)) == list(range(45, 55))
    assert source.late == 10
    order.remove(30)
    assert order == sorted(order)


def test_late_samples_count_when_they_are_taken(tmp_path: Path) -> None:
    """Batches that are read ahead count late samples once."""
    given = np.arange(100)
    given[[40, 77]] = 0
    source = EventTimeSequence(files(tmp_path, given), 5)
    batches = fleet.dataset(source, 4, epochs=2, prefetch=3)
    assert len(rows(batches)) == 196
    assert source.late == 4


def test_timestamps(tmp_path: Path) -> None:
    """Timestamps of any unit and zone count microseconds; without one a row is bad."""
    import datetime

    zone = datetime.UTC
    given = [datetime.datetime(2026, 1, 1, 0, 0, second, 5, zone) for second in (2, 1, 3)]
    source = files(tmp_path, given)
    (batch,) = fleet.dataset(EventTimeSequence(source, 2), 3)
    assert batch.times.tolist() == [1767225601000005, 1767225602000005, 1767225603000005]
    missing = files(tmp_path, [given[0], None, given[2]])
    with pytest.raises(UsageError, match=r"row group 0 row 1: at is None"):
        list(fleet.dataset(missing, 3))


def test_files_in_their_order(tmp_path: Path) -> None:
    """With a time unshuffled rows come as they are in the files; shuffled ones do not."""
    source = files(tmp_path, range(60))
    assert rows(fleet.dataset(source, 4)) == list(range(60))
    shuffled = list(fleet.dataset(source, 4, shuffle_seed=1))
    assert rows(shuffled) == times(shuffled) != list(range(60))
    assert sorted(rows(shuffled)) == list(range(60))


def test_refusals(tmp_path: Path) -> None:
    """Samples without times, shuffling and columns that are no times are refused in a sentence."""
    source = files(tmp_path, range(5))
    from psfleet.data.parquet import ParquetFiles  # needs pyarrow, without which `files` skips

    with pytest.raises(UsageError, match="shuffle_seed is 3; samples in order of time"):
        list(fleet.dataset(EventTimeSequence(source, 2), 2, shuffle_seed=3))
    plain = ParquetFiles(tmp_path, FEATURES)
    with pytest.raises(UsageError, match="the samples have no times; name their column"):
        list(fleet.dataset(EventTimeSequence(plain, 2), 2))
    with pytest.raises(
        UsageError, match="'label' is of type float; it must be of whole numbers or t"
    ):
        ParquetFiles(tmp_path, FEATURES, time="label")
    with pytest.raises(UsageError, match="window is 0"):
        EventTimeSequence(source, 0)


@pytest.mark.parametrize("column", ["at", None])
def test_messages(column: str | None) -> None:
    """Messages come in order of a value of theirs, or of their own timestamps, also from two partitions."""
    pytest.importorskip(
        "confluent_kafka", reason="confluent-kafka is not installed: pip install psfleet[kafka]"
    )
    from psfleet.data.kafka import KafkaTopic
    from tests.datasets.broker import Broker

    given = [disordered(30, 4, seed).tolist() for seed in (1, 2)]
    with Broker() as broker:
        for partition, own in enumerate(given):
            values = [json.dumps({"row": time, "at": time}).encode() for time in own]
            broker.send("clicks", partition, values, [1000 + time for time in own])
        both = {0: 30, 1: 30}
        topic = KafkaTopic(
            broker.servers, "clicks", FEATURES, start={0: 0, 1: 0}, end=both, time=column
        )
        # The times of the partitions differ by 4, blocks of 2 add 2, and there are two of them.
        batches = list(fleet.dataset(EventTimeSequence(topic, window=16), 2))
        topic.close()
    assert rows(batches) == sorted(given[0] + given[1])
    assert times(batches) == [time + (0 if column else 1000) for time in rows(batches)]


def test_messages_to_come() -> None:
    """A topic without an end gives a window when three more have come; a message without time is bad."""
    pytest.importorskip(
        "confluent_kafka", reason="confluent-kafka is not installed: pip install psfleet[kafka]"
    )
    from psfleet.data.kafka import KafkaTopic
    from tests.datasets.broker import Broker

    def message(time: Any) -> bytes:
        return json.dumps({"row": 1, "at": time}).encode()

    with Broker() as broker:
        broker.send("clicks", 0, [message(time) for time in (1, 0, 3, 2)])
        topic = KafkaTopic(broker.servers, "clicks", FEATURES, start={0: 0}, time="at")
        batches = iter(fleet.dataset(EventTimeSequence(topic, window=2), 2))
        assert times([next(batches)]) == [0, 1]
        broker.send("clicks", 0, [message(time) for time in (5, 4, 7, 6)])
        assert times([next(batches), next(batches)]) == [2, 3, 4, 5]
        broker.send("clicks", 0, [message(time) for time in (8, "9", 10, 11)])
        with pytest.raises(UsageError, match="partition 0 offset 9: at is '9'"):
            next(batches)
        topic.close()
