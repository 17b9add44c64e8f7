"""Callbacks of training loops: when they are called, early stopping, the best snapshot, and loggers."""

import importlib.util
import math
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import fleet
from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.fleet.callbacks import Callback, EarlyStopping, KeepBest, MlflowLogger, WandbLogger
from psfleet.fleet.fleet import Fleet
from tests.launch.conftest import Launch, launch

__all__ = ["launch"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """A process that trains alone, and has no callbacks before and afterwards."""
    psfleet.reset()
    yield
    psfleet.reset()


class Recorder(Callback):
    """What was called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Record."""
        self.calls.append(("step", step, dict(values)))

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Record."""
        self.calls.append(("evaluation", step, dict(values)))

    def on_snapshot(self, step: int, folder: str) -> None:
        """Record."""
        self.calls.append(("snapshot", step, Path(folder).name))

    def close(self) -> None:
        """Record."""
        self.calls.append("closed")


def trained(scores: list[float], *callbacks: Callback) -> list[int]:
    """Train a step for each score, which is that step's evaluation; the value of each row at the end."""
    fleet.init()
    with psfleet.connect() as ps:
        table = ps.sparse_table(
            "rows", 1, psfleet.optimizer.SGD(1.0), psfleet.initializer.Constant(0.0)
        )
        fleet.add_callbacks(*callbacks)
        for rows in fleet.dataset(len(scores), 1):
            table.push(rows, np.full((1, 1), -1, np.float32)).wait()
            fleet.log("loss", 1 / (1 + rows[0]))
            fleet.report_evaluation({"auc": scores[rows[0]], "gauc": 0.5})
        counts: list[int] = table.pull(np.arange(len(scores))).reshape(-1).astype(int).tolist()
    return counts


def test_calls(tmp_path: Path) -> None:
    """A callback sees each step with what was logged in it, evaluations, snapshots and the end, in order."""
    recorder = Recorder()
    assert trained([0.5, 0.25], KeepBest("auc", str(tmp_path / "best")), recorder) == [1, 1]
    assert recorder.calls == [
        ("snapshot", 1, "best"),
        ("evaluation", 1, {"auc": 0.5, "gauc": 0.5}),
        ("step", 1, {"loss": 1.0}),
        ("evaluation", 2, {"auc": 0.25, "gauc": 0.5}),
        ("step", 2, {"loss": 0.5}),
    ]
    fleet.stop_worker()
    assert recorder.calls[-1] == "closed"


def test_early_stopping() -> None:
    """Training ends after so many evaluations in a row that are no better; further loops have no batches."""
    stopping = EarlyStopping("auc", patience=2)
    assert trained([0.5, 0.4, 0.6, 0.6, math.nan, 0.9, 0.9], stopping) == [1, 1, 1, 1, 1, 0, 0]
    assert (stopping.best, stopping.best_step) == (0.6, 3)
    assert list(fleet.shard([1, 2])) == list(fleet.dataset(3, 1)) == []


def test_the_smallest_is_the_best() -> None:
    """A loss is best where it is smallest, and changes up to `least_change` are none."""
    stopping = EarlyStopping("auc", mode="min", least_change=0.1)
    assert trained([0.9, 0.7, 0.65, 0.1], stopping) == [1, 1, 1, 0]


def test_the_best_snapshot(tmp_path: Path) -> None:
    """The folder has the tables of the best evaluation, whatever came later."""
    folder = str(tmp_path / "best")
    assert trained([0.1, 0.8, 0.3], KeepBest("auc", folder)) == [1, 1, 1]
    psfleet.reset()
    with psfleet.connect() as ps:
        table = ps.sparse_table(
            "rows", 1, psfleet.optimizer.SGD(1.0), psfleet.initializer.Constant(0.0)
        )
        ps.load(folder)
        assert table.pull(np.arange(3)).reshape(-1).tolist() == [1, 1, 0]


def test_refusals() -> None:
    """What is no callback, and a metric that an evaluation lacks, are named."""
    with pytest.raises(UsageError, match=r"add_callbacks: callbacks is 3, it must be a Callback"):
        fleet.add_callbacks(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"EarlyStopping watches 'ndcg'; the evaluation has auc"):
        trained([0.5], EarlyStopping("ndcg"))


def test_all_workers_stop_alike(launch: Launch, tmp_path: Path) -> None:
    """Worker 0's evaluation ends the loops of all at the same step, also in a worker that was killed
    between and started again: it goes on with the best value and the counts that it had."""
    script = Path(__file__).with_name("scripts") / "stopping.py"
    mark, folder = tmp_path / "died", tmp_path / "best"
    options = ("--sync", "--no-progress", "--servers", "1", "--workers", "2")
    job = launch(*options, "--restart-workers", "1", str(script), str(mark), str(folder), "7")
    job.ends_with(0)
    assert mark.exists()
    logs = "".join(path.read_text() for path in sorted(job.folder.glob("**/workerlog.*")))
    assert "worker 0: 10 10 0.7 2" in logs, logs
    assert "worker 1: 10 10 0.7 2" in logs, logs
    assert (folder / "manifest.json").exists()


LOGGED = """
import sys
import psfleet
from psfleet import fleet
from psfleet.fleet.callbacks import WandbLogger

fleet.init()
fleet.add_callbacks(WandbLogger(project="p", mode="offline", dir=sys.argv[1]))
with psfleet.connect() as ps:
    table = ps.sparse_table("rows", 1, psfleet.optimizer.SGD(1.0))
    for rows in fleet.dataset(2, 1):
        table.push(rows, [[1.0]]).wait()
        fleet.log("loss", 0.25)
        fleet.report_evaluation({"auc": 0.75})
    fleet.save_persistables(sys.argv[1] + "/best")
"""


@pytest.mark.long
def test_wandb(tmp_path: Path) -> None:
    """Values, evaluations and the snapshot are in the file of a run without a network."""
    pytest.importorskip("wandb", reason="wandb is not installed: pip install psfleet[wandb]")
    script = tmp_path / "logged.py"
    script.write_text(LOGGED)
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=170
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    [record] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    text = record.read_bytes()
    for word in (b"loss", b"0.25", b"auc", b"0.75", b"snapshot", b"/best"):
        assert word in text


@pytest.mark.long
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, evaluations and the snapshot are in a run of a folder, which a later logger goes on with."""
    mlflow = pytest.importorskip(
        "mlflow", reason="MLflow is not installed: pip install psfleet[mlflow]"
    )
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    place = (tmp_path / "runs").as_uri()
    logger = MlflowLogger("clicks", place)
    trained([0.5, 0.75], logger, KeepBest("auc", str(tmp_path / "best")))
    fleet.stop_worker()
    client = mlflow.MlflowClient(tracking_uri=place)
    [run] = client.search_runs([client.get_experiment_by_name("clicks").experiment_id])
    actual = client.get_metric_history(run.info.run_id, "auc")
    assert [(each.step, each.value) for each in actual] == [(1, 0.5), (2, 0.75)]
    assert run.data.metrics["loss"] == 0.5
    assert run.data.tags["snapshot"].endswith("best")
    assert run.info.status == "FINISHED"
    again = MlflowLogger("clicks", place)
    again.set_state_dict(logger.state_dict())
    trained([0.25], again)
    assert client.get_metric_history(run.info.run_id, "auc")[-1].value == 0.25


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        ("sqlite:////{}/runs.db", "unsupported URI|SQLAlchemy|sqlalchemy"),
        ("http://127.0.0.1:{}", "refused"),
    ],
)
def test_a_logger_is_checked_at_once(store: str, reason: str, tmp_path: Path) -> None:
    """A store that MLflow cannot use ends the script where the logger is added, in a sentence that says which
    can; workers other than the first do not ask for it, nor for the package."""
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install psfleet[mlflow]")
    if importlib.util.find_spec("sqlalchemy") and store.startswith("sqlite"):
        pytest.skip("the whole package of MLflow is installed")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        uri = store.format(tmp_path if "sqlite" in store else unused.getsockname()[1])
        logger = MlflowLogger("clicks", uri)
        fleet.init()
        with pytest.raises(ConfigError, match=f"MLflow cannot log to .*{reason}.*file:///data"):
            fleet.add_callbacks(logger)


def test_loggers_of_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only worker 0 needs the packages."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    fleet.init()
    for logger in (MlflowLogger("clicks"), WandbLogger(project="clicks")):
        with pytest.raises(ConfigError, match="which is not installed; run: pip install"):
            fleet.add_callbacks(logger)
    monkeypatch.setattr(Fleet, "is_first_worker", lambda self: False)
    fleet.add_callbacks(MlflowLogger("clicks"), WandbLogger(project="clicks"))


SNAPSHOTS = """
import itertools
import psfleet
from psfleet import fleet
from psfleet.fleet.callbacks import Callback


class Told(Callback):
    def __init__(self):
        self.calls = []

    def on_snapshot(self, step, folder):
        self.calls.append((step, folder))
        print("told", step, folder, flush=True)


fleet.init()
told = Told()
fleet.add_callbacks(told)
with psfleet.connect() as ps:
    table = ps.sparse_table("rows", 1, psfleet.optimizer.SGD(1.0))
    for step in fleet.shard(itertools.count(1)):
        table.push([step], [[1.0]]).wait()
        if len(told.calls) == 2:
            break
    print("taken", step, fleet.snapshot(), flush=True)
fleet.stop_worker()
"""


def test_snapshots_of_the_servers(launch: Launch, tmp_path: Path) -> None:
    """A callback hears of the snapshots of --snapshot-every, each once, with its last step and its folder,
    and once of one that the script takes."""
    script = tmp_path / "script.py"
    script.write_text(SNAPSHOTS)
    options = ("--sync", "--no-progress", "--servers", "2", "--workers", "1")
    job = launch(*options, "--snapshot-every", "20 rounds", "--job", "j", str(script))
    out, _ = job.ends_with(0)
    said = [line.split() for line in out.splitlines() if "told" in line or "taken" in line]
    taken = next(words[-2:] for words in said if "taken" in words)
    words_of_table = [words[-2:] for words in said if "told" in words]
    assert words_of_table.count(taken) == 1
    assert len({folder for _, folder in words_of_table}) == len(words_of_table) >= 3
    assert all(int(step) % 20 == 0 for step, folder in words_of_table if folder != taken[1])
