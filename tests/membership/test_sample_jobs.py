"""Parquet files and a Kafka topic in a job whose worker is killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("scripts") / "samples_dying.py"
JOB = ["-m", "psfleet_launch", "--servers", "2", "--workers", "2", "--sync", "--no-progress"]


LABELS = [None if row % 10 == 7 else 1.0 for row in range(60)]
TWICE = [0 if label is None else 2 for label in LABELS]


def run(place: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The job, over two epochs of the samples at a place."""
    command = [sys.executable, *JOB, "--log-dir", str(folder / "logs"), "--restart-workers", "1"]
    return subprocess.run(
        [*command, str(SCRIPT), place, str(folder / "mark")],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def check(done: subprocess.CompletedProcess[str]) -> None:
    """A worker was killed, and each good sample counts once in each epoch."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker 1 ended with signal 9" in done.stderr
    assert f"used {TWICE}" in done.stdout


def test_every_row_is_used_once_an_epoch(tmp_path: Path) -> None:
    """Sync mode: with a worker that is killed and started again each good row counts once in each epoch."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = tmp_path / "data"
    data.mkdir()
    for number, (first, end) in enumerate(((0, 26), (26, 60))):
        labels = pa.array(LABELS[first:end], pa.float32())
        table = pa.table({"row": range(first, end), "label": labels})
        pq.write_table(table, data / f"{number}.parquet", row_group_size=8)
    check(run(str(data), tmp_path))


def test_every_message_is_used_once_an_epoch(tmp_path: Path) -> None:
    """Likewise each good message of a topic."""
    pytest.importorskip(
        "confluent_kafka", reason="confluent-kafka is not installed: pip install psfleet[kafka]"
    )
    from tests.datasets.broker import Broker

    messages = [
        json.dumps({"row": row, "label": label}).encode() for row, label in enumerate(LABELS)
    ]
    with Broker() as broker:
        broker.send("rows", 0, messages[:30])
        broker.send("rows", 1, messages[30:])
        check(run(f"kafka://{broker.servers}", tmp_path))
