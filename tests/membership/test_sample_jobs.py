"""Parquet files and a Kafka topic in jobs of which a worker is killed, or everything."""

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import Launch, launch

__all__ = ["launch"]

SCRIPT = str(Path(__file__).with_name("scripts") / "samples_dying.py")
LABELS = [None if row % 10 == 7 else 1.0 for row in range(120)]
TWICE = [0 if label is None else 2 for label in LABELS]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A folder of Parquet files with the labels, some of them bad."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = tmp_path / "data"
    data.mkdir()
    for number, (first, end) in enumerate(((0, 46), (46, 70), (70, 120))):
        labels = pa.array(LABELS[first:end], pa.float32())
        table = pa.table({"row": range(first, end), "label": labels})
        pq.write_table(table, data / f"{number}.parquet", row_group_size=16)
    return str(data)


@pytest.fixture
def broker() -> Iterator[Any]:
    """A broker of Kafka."""
    pytest.importorskip(
        "confluent_kafka", reason="confluent-kafka is not installed: pip install psfleet[kafka]"
    )
    from tests.datasets.broker import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture
def topic(broker: Any) -> str:
    """The same in the two partitions of a topic."""
    messages = [
        json.dumps({"row": row, "label": label}).encode() for row, label in enumerate(LABELS)
    ]
    broker.send("rows", 0, messages[:60])
    broker.send("rows", 1, messages[60:])
    return f"kafka://{broker.servers}"


@pytest.fixture
def growing(broker: Any) -> str:
    """A topic without an end: three partitions with 40 of the rows each, and others behind them."""
    for partition in range(3):
        rows = [*range(40 * partition, 40 * partition + 40), *range(1000, 1200)]
        messages = [json.dumps({"row": row, "label": 1.0}).encode() for row in rows]
        broker.send("rows", partition, messages)
    return f"grows://{broker.servers}"


def run(launch: Launch, name: str, script: list[str], *options: str) -> tuple[int, str]:
    """The job of that name in sync mode: exit code and output, when nothing of it is left.

    Args:
        script: The arguments of the script, without the job's folder.
    """
    place, *death = script
    arguments = [SCRIPT, place, f"psfleet-logs/{name}", *death]
    job = launch("--sync", "--no-progress", "--job", name, *options, *arguments)
    code, out, err = job.ends()
    job.until(lambda: not job.family(), "end of all processes")
    return code, out + err


@pytest.mark.parametrize(
    ("samples", "used"),
    [("rows", TWICE), pytest.param("growing", [1] * 120, marks=pytest.mark.long)],
)
def test_a_killed_worker_starts_again(
    launch: Launch, request: pytest.FixtureRequest, samples: str, used: list[int]
) -> None:
    """Sync mode: a worker is killed and started again, which one line says: each good row counts once in each
    epoch, each message of partitions once that are found by each worker at another time."""
    options = ("--servers", "2", "--workers", "2", "--restart-workers", "1")
    place = request.getfixturevalue(samples)
    code, text = run(launch, "j", [place, "worker:1:4:pulled"], *options)
    assert code == 0, text
    assert "worker 1 ended with signal 9; a new process takes its seat (restart 1 of 1)" in text
    assert f"used {used}" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("samples", "seed", "workers", "used"),
    [
        ("rows", 1, (2, 3, 1), TWICE),
        ("topic", 2, (1, 2), TWICE),
        ("growing", 5, (1, 2), [1] * 120),
        ("batches:rows", 4, (2, 1), TWICE),  # of RecordBatches that an iterable gives
    ],
)
def test_everything_is_killed(
    launch: Launch,
    request: pytest.FixtureRequest,
    samples: str,
    seed: int,
    workers: tuple[int, ...],
    used: list[int],
) -> None:
    """Sync mode: the launcher is killed, and with it all else, and the job goes on with the next number of
    workers, until the last one: each good sample counts once in each epoch."""
    form, _, source = samples.rpartition(":")
    place = f"{form}:{request.getfixturevalue(source)}".removeprefix(":")
    dice, resume = random.Random(seed), list[str]()
    for number, count in enumerate(workers, 1):
        where = dice.randrange(count), dice.randint(3, 5), dice.choice(["pulled", "pushed"])
        death = [":".join(map(str, ("job", *where)))] if number < len(workers) else []
        servers = ("--servers", str(dice.randint(1, 2)), "--snapshot-every", "2 rounds")
        options = (*servers, "--workers", str(count), *resume)
        code, text = run(launch, f"j{number}", [place, *death], *options)
        assert code == (-signal.SIGKILL if death else 0), text
        resume = ["--resume", f"psfleet-logs/j{number}"]
    assert f"used {used}" in text
