"""Parquet files in a job whose worker is killed."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install psfleet[parquet]")

import pyarrow as pa  # after the check for pyarrow
import pyarrow.parquet as pq

SCRIPT = Path(__file__).with_name("scripts") / "parquet_dying.py"
JOB = ["-m", "psfleet_launch", "--servers", "2", "--workers", "2", "--sync", "--no-progress"]


def test_every_row_is_used_once_an_epoch(tmp_path: Path) -> None:
    """Sync mode: with a worker that is killed and started again each good row counts once in each epoch."""
    data = tmp_path / "data"
    data.mkdir()
    for number, (first, end) in enumerate(((0, 26), (26, 60))):
        labels = [None if row % 10 == 7 else 1.0 for row in range(first, end)]
        table = pa.table({"row": range(first, end), "label": pa.array(labels, pa.float32())})
        pq.write_table(table, data / f"{number}.parquet", row_group_size=8)
    command = [sys.executable, *JOB, "--log-dir", str(tmp_path / "logs"), "--restart-workers", "1"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(data), str(tmp_path / "mark")],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker 1 ended with signal 9" in done.stderr
    assert f"used {[0 if row % 10 == 7 else 2 for row in range(60)]}" in done.stdout
