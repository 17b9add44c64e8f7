"""What a job keeps on disk is for its user alone; what the user saves is as the user's umask says."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import Launch

SCRIPT = """
import os
import numpy as np
import psfleet as ps
from psfleet import fleet, layers, optimizer

fleet.init()
x = layers.data("x", [None, 2])
loss = layers.mean(layers.fc(x, 1))
fleet.distributed_optimizer(optimizer.SGD(0.1), fleet.DistributedStrategy(a_sync=False)).minimize(loss)
exe = ps.Executor()
for _ in range(200):
    exe.run(feed={"x": np.ones((2, 2), np.float32)}, fetch_list=[loss])
fleet.save_persistables("model")
"""


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """That of most systems, under which files are made for everybody to read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    """Its permissions."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("usual_umask")
def test_logs_and_snapshots_are_private(launch: Launch, tmp_path: Path) -> None:
    """Also in a folder that an earlier job left open; the saved model is open as the umask says."""
    (tmp_path / "train.py").write_text(SCRIPT)
    logs = tmp_path / "psfleet-logs/job"
    logs.mkdir(parents=True)
    (logs / "workerlog.0").write_text("earlier")
    launcher = launch(
        *("--servers", "1", "--workers", "1", "--sync", "--job", "job", "--no-progress"),
        *("--durability", "log", "--snapshot-every", "10 rounds", "train.py"),
        PSFLEET_RESUME=str(tmp_path / "nowhere"),
        PSFLEET_SNAPSHOTS=str(tmp_path / "elsewhere"),
    )
    code, out, err = launcher.ends(120)
    assert code == 0, out + err + launcher.log("*")
    assert mode(logs) == 0o700
    assert mode(logs / "snapshots") == 0o700
    assert list((logs / "snapshots").glob("snapshot-*"))
    files = [path for path in logs.iterdir() if path.name.startswith(("serverlog", "workerlog"))]
    files += logs.glob("server.*.log")
    assert len(files) >= 3
    assert {mode(path) for path in files} == {0o600}
    assert not (tmp_path / "elsewhere").exists()
    assert {mode(path) for path in (tmp_path / "model").iterdir()} == {0o644}
    assert mode(tmp_path / "model") == 0o755
