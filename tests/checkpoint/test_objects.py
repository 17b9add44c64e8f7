"""Snapshots, exports and models in object stores: an S3 server, and one that fails every tenth request."""

import itertools
import json
import logging
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import psfleet
from psfleet import checkpoint, serving
from psfleet.core.base import object_store
from psfleet.core.base.errors import CheckpointError, ConfigError
from psfleet.core.base.object_store import latest_snapshot, own_name, own_snapshots
from psfleet.core.base.settings.kinds import local_path, shown_url, url_of
from psfleet.core.engine.rules.adam import Adam
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.serving.batcher import Batcher
from psfleet.serving.follower import Follower
from psfleet.serving.model import ModelVersion, ServedModel
from psfleet_launch.commands.model_commands import _named
from psfleet_launch.job import job_folder
from psfleet_launch.job.job_folder import check_snapshot
from psfleet_server.durability.log import files_of
from psfleet_server.snapshots.job_snapshots import SnapshotFolder
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.programs import ended
from tests.recovery.test_chained_logs import Server
from tests.serving import models
from tests.trainings import TrainingWorkload, same_bits, train_together

fsspec: Any = pytest.importorskip("fsspec", reason="fsspec is not installed")

TABLE = TableSpec("t", "sparse", (3,), Adam())
IDS = np.arange(200)
SECRET = "not-to-be-logged"


def train(runtime: Runtime, steps: int, seed: int = 0) -> NDArray[np.float32]:
    """Push to some rows; the weights of all."""
    dice = np.random.default_rng(seed)
    runtime.create(TABLE)
    for _ in range(steps):
        ids = dice.choice(IDS, 40, replace=False)
        noise = dice.standard_normal((40, 3)).astype(np.float32)
        runtime.push([Gradient(TABLE.key, noise, ids, 0.1)]).wait()
    return weights(runtime)


def weights(runtime: Runtime) -> NDArray[np.float32]:
    """The weights of all ids."""
    runtime.create(TABLE)
    [rows] = runtime.pull([Read(TABLE.key, IDS)])
    return rows


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An S3 server on loopback, and its endpoint."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    command = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "Running on http" in line)
        yield line.partition("Running on ")[2].strip()
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture(scope="module")
def bucket(server: str) -> Iterator[str]:
    """A bucket of that server, which s3fs finds by the environment; the threads of s3fs stay for good."""
    settings = {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        urllib.request.urlopen(urllib.request.Request(f"{server}/bucket", method="PUT")).close()
        object_store.ObjectStore("s3://bucket/none").sizes()
        yield "s3://bucket"


@pytest.mark.long
def test_s3(
    bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A fleet saves, one of other size resumes; deltas and exports are there; no secret is logged."""
    caplog.set_level(logging.DEBUG, "psfleet")
    with LocalFleet(servers=2, workers=1, in_process=True) as fleet:
        worker = fleet.connect(0, "sync")
        first = train(worker, 3)
        assert worker.save(f"{bucket}/model") == f"{bucket}/model"
        second = train(worker, 3, seed=1)
        worker.save(f"{bucket}/model")  # in place of the one before
        with Follower(fleet.endpoints, snapshot=f"{bucket}/model") as follower:
            assert follower.snapshot == f"{bucket}/model"
            np.testing.assert_array_equal(follower.look_up("t", IDS), second)
        with psfleet.connect(follow=fleet.endpoints, snapshot=f"{bucket}/model") as client:
            np.testing.assert_array_equal(client.sparse_table("t", 3).pull(IDS), second)
        worker.close()
    assert len(checkpoint.read_manifest(f"{bucket}/model").files) == 2
    assert len(object_store.ObjectStore(f"{bucket}/model").sizes()) == 3  # nothing of the first
    assert (first != second).any()
    with LocalFleet(servers=1, workers=1, resume=check_snapshot(f"{bucket}/model")) as fleet:
        worker = fleet.connect(0, "sync")
        np.testing.assert_array_equal(weights(worker), second)
        worker.close()
    alone = EmbeddedRuntime()
    alone.load(f"{bucket}/model")
    alone.save(f"{bucket}/own/base", base=True)
    third = train(alone, 2, seed=2)
    alone.save(f"{bucket}/own/delta", delta=True)
    with psfleet.connect(checkpoint=f"{bucket}/own/delta") as client:
        np.testing.assert_array_equal(client.sparse_table("t", 3).pull(IDS), third)
    [name] = checkpoint.export(f"{bucket}/own/delta", f"{bucket}/plain", "npz")
    object_store.ObjectStore(f"{bucket}/plain").get(name.name, tmp_path / "t.npz")
    assert len(np.load(tmp_path / "t.npz")["ids"]) > 100
    with pytest.raises(ConfigError, match="--resume is no complete snapshot"):
        check_snapshot(f"{bucket}/nothing")
    output = capfd.readouterr()
    assert SECRET not in caplog.text + output.out + output.err


SCRIPT = """
import sys, time
import numpy as np, psfleet
from psfleet import fleet, optimizer
from psfleet.core.base.object_store import latest_snapshot

fleet.init()
with psfleet.connect() as ps:
    table = ps.sparse_table("t", dim=3, optimizer=optimizer.Adam(0.1))
    for step in fleet.shard(range(24)):
        table.push(np.arange(200), np.full((200, 3), step + 1.0)).wait()
        while step == 12 and not latest_snapshot(sys.argv[1]):
            time.sleep(0.02)
    print("total", float(table.pull(np.arange(200)).sum()))
"""


def launched(folder: Path, servers: int, place: str, *options: str) -> str:
    """What a job prints in the end; it awaits a whole snapshot in the place halfway."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    job = ["--servers", str(servers), "--workers", "1", "--sync", "--log-dir", str(folder / "logs")]
    command = [sys.executable, "-m", "psfleet_launch", *job, *options, str(script), place]
    process = ended(command)
    assert process.returncode == 0, process.stderr
    [line] = [line for line in process.stdout.splitlines() if "total" in line]
    return line.partition("total")[2]


@pytest.mark.long
def test_snapshot_store(bucket: str, tmp_path: Path) -> None:
    """A job keeps its last snapshots at a URL; one that resumes there, on fewer servers, ends as one that
    went on.

    The end of a job may leave a part of the snapshot under way, and the oldest that this was to replace.
    """
    store = (f"{bucket}/jobs/taste", "--job", "taste", "--snapshot-store", f"{bucket}/jobs")
    whole = launched(tmp_path, 2, *store, "--snapshot-every", "3 rounds")
    kept = [*filter(object_store.is_whole, own_snapshots(f"{bucket}/jobs/taste"))]
    assert 1 <= len(kept) <= 4
    assert own_snapshots(str(tmp_path / "logs" / "taste" / "snapshots")) == []
    assert latest_snapshot(f"{bucket}/jobs/taste") == kept[-1]
    assert check_snapshot(f"{bucket}/jobs/taste") == kept[-1]
    resumed = launched(tmp_path, 1, *store, "--resume", f"{bucket}/jobs/taste")
    assert own_snapshots(f"{bucket}/jobs/taste") == kept
    assert resumed == whole
    job_folder.clear(f"{bucket}/jobs/taste", "")
    assert own_snapshots(f"{bucket}/jobs/taste") == []


@pytest.mark.long
def test_logs_go_on_from_a_store(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers with logs die around snapshots that are kept at a URL: the bits are those without a death, and
    the log before a whole snapshot is gone."""
    monkeypatch.setenv("PSFLEET_SNAPSHOT_STORE", f"{bucket}/logs/j")
    alone = EmbeddedRuntime()
    TrainingWorkload(steps=60).run(alone)
    crashes = {0: ["complete:1", "replay:1"], 1: ["cut:1"]}
    with LocalFleet(2, 1, durability="log", crashes=crashes, snapshot_every="5 rounds") as fleet:
        log = fleet.snapshots.parent / "server.0.log"
        training = TrainingWorkload(
            steps=60, awaits=lambda: fleet.restarts >= 2 and not log.exists()
        )
        with fleet.reviving():
            states = train_together(
                1, training, lambda worker: ClusterRuntime(fleet.environment(worker), "sync")
            )
            assert fleet.wait(300) == [0, 0], [fleet.log(i) for i in range(2)]
        same_bits(states, training.result(alone))
        assert fleet.restarts >= 2
        assert latest_snapshot(f"{bucket}/logs/j")
        assert not log.exists()
        assert not fleet.snapshots.exists()


@pytest.mark.parametrize("fails", [False, True])
def test_a_log_is_cut_when_its_snapshot_is_whole(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before its manifest is there, nor while the store fails: a server then starts from the log."""
    monkeypatch.setattr(object_store, "_PAUSE", 0.0)
    place = f"memory://cut/{fails}"
    server = Server(tmp_path, place)
    server.begin()
    server.push(1, 2)
    server.snapshot(1, complete=False)
    assert not server.taken.can_start_from(1)
    server.snapshot(2, complete=True)
    server.push(3)
    expected = server.content()
    if not fails:
        assert server.taken.can_start_from(2)
        server.taken.shorten(2)
    else:

        def failing(*arguments: Any, **named: Any) -> Any:
            raise OSError("the store fails")

        for name in ("get_file", "cat_file", "ls"):
            monkeypatch.setattr(type(fsspec.filesystem("memory")), name, failing)
        assert not server.taken.can_start_from(2)
    server.log.close()
    assert list(files_of(tmp_path / "server.0.log")) == ([0, 1, 2] if fails else [2])
    again = Server(tmp_path, place)
    assert again.content() == expected
    again.log.close()


def test_pruning() -> None:
    """The last whole snapshots of a job stay in a store, and what they build on; parts of one go."""
    memory = fsspec.filesystem("memory")
    for number, base in ((1, 0), (2, 0), (3, 0), (4, 2)):
        document = {"files": [], **({"base": {"path": f"../{own_name(base)}"}} if base else {})}
        folder = f"/pruned/taste/{own_name(number)}"
        memory.pipe_file(f"{folder}/shard-0-of-1.safetensors", b"x")
        memory.pipe_file(f"{folder}/{checkpoint.MANIFEST}", json.dumps(document).encode())
    for number in (3, 5):
        memory.pipe_file(f"/pruned/taste/{own_name(number)}/shard-1-of-2.safetensors", b"x")
    memory.rm_file(f"/pruned/taste/{own_name(3)}/{checkpoint.MANIFEST}")
    snapshots = SnapshotFolder("memory://pruned/taste", keep=1)
    snapshots.prune()
    kept = own_snapshots("memory://pruned/taste")
    assert kept == [f"memory://pruned/taste/{own_name(number)}" for number in (2, 4)]
    assert snapshots.last() == 4


def test_models(bucket: str, tmp_path: Path) -> None:
    """An export at a URL predicts as the model does, and a model at a URL is exported; none is replaced."""
    expected = models.train(tmp_path)
    object_store.upload(tmp_path / "model", f"{bucket}/clicks")
    serving.export(f"{bucket}/clicks", f"{bucket}/small", "npz", "bfloat16")
    for url, error in ((f"{bucket}/clicks", 0.0), (f"{bucket}/small", 1e-2)):
        actual = serving.load(url, models.FEATURES)(models.BATCH)
        assert np.abs(actual - expected).max() <= error
    with pytest.raises(ConfigError, match="'s3://bucket/small' is there already"):
        serving.export(f"{bucket}/clicks", f"{bucket}/small")


def test_served_versions(bucket: str, tmp_path: Path) -> None:
    """Versions at a URL serve by number; a newer one is taken up once it is whole; a store that fails is not
    the end."""
    assert _named(f"{bucket}/ctr/") == ("ctr", f"{bucket}/ctr/")
    assert _named(f"clicks={bucket}/ctr") == ("clicks", f"{bucket}/ctr")
    expected = models.train(tmp_path)
    object_store.upload(tmp_path / "model", f"{bucket}/ctr/1")
    files = sorted(path.name for path in (tmp_path / "model").iterdir())
    object_store.upload(
        tmp_path / "model", f"{bucket}/ctr/2", [name for name in files if name != "program.json"]
    )
    source = serving.VersionedModel(f"{bucket}/ctr", models.FEATURES)

    def load(number: int) -> ModelVersion:
        model = source.load(number)
        return ModelVersion(number, model, Batcher(model))

    served = ServedModel("ctr", source.numbers, load)
    assert served.active.number == 1
    np.testing.assert_allclose(served.active.model(models.BATCH), expected)
    object_store.upload(tmp_path / "model", f"{bucket}/ctr/2")
    served.refresh()
    assert served.active.number == 2
    served.numbers = serving.VersionedModel("nothing://host/m").numbers
    served.refresh()
    assert served.active.number == 2


def test_failing_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tenth request fails: snapshots are whole or not there, and each is what was saved."""
    memory = fsspec.filesystem("memory")
    numbers = itertools.count(1)
    for name in ("put_file", "get_file", "cat_file", "ls", "rm_file"):
        plain = getattr(type(memory), name)

        def failing(self: Any, *arguments: Any, _plain: Any = plain, **named: Any) -> Any:
            if next(numbers) % 10 == 0:
                raise OSError("the store fails")
            return _plain(self, *arguments, **named)

        monkeypatch.setattr(type(memory), name, failing)
    monkeypatch.setattr(object_store, "_PAUSE", 0.0)
    for seed in range(6):
        runtime = EmbeddedRuntime()
        expected = train(runtime, 2, seed)
        runtime.save("memory://failing/model")
        other = EmbeddedRuntime()
        other.load("memory://failing/model")
        np.testing.assert_array_equal(weights(other), expected)
    assert next(numbers) > 40


def test_manifest_is_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that dies before the manifest leaves the snapshot before; one without it is refused."""
    runtime = EmbeddedRuntime()
    expected = train(runtime, 2)
    runtime.save("memory://whole/model")
    train(runtime, 2, seed=1)

    def put(store: object_store.ObjectStore, file: Path, name: str) -> None:
        if name == checkpoint.MANIFEST:
            raise KeyboardInterrupt
        plain(store, file, name)

    plain = object_store.ObjectStore.put
    monkeypatch.setattr(object_store.ObjectStore, "put", put)
    with pytest.raises(KeyboardInterrupt):
        runtime.save("memory://whole/model")
    with pytest.raises(KeyboardInterrupt):
        runtime.save("memory://whole/other")
    other = EmbeddedRuntime()
    other.load("memory://whole/model")
    np.testing.assert_array_equal(weights(other), expected)
    with pytest.raises(CheckpointError, match=r"no complete snapshot"):
        other.load("memory://whole/other")


def test_damage() -> None:
    """A file that is not as it was written is refused, and so is a folder with something else."""
    runtime = EmbeddedRuntime()
    train(runtime, 2)
    runtime.save("memory://damaged/model")
    memory = fsspec.filesystem("memory")
    [file] = json.loads(memory.cat_file("/damaged/model/manifest.json"))["files"]
    memory.pipe_file(f"/damaged/model/{file['file']}", b"x" * file["bytes"])
    with pytest.raises(CheckpointError, match="is damaged"):
        EmbeddedRuntime().load("memory://damaged/model")
    memory.pipe_file("/damaged/letters/a.txt", b"x")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        runtime.save("memory://damaged/letters")


def test_urls(tmp_path: Path) -> None:
    """A Path of a URL is the URL, file: is a path, and messages are without credentials."""
    assert url_of(Path("s3://bucket/m")) == url_of("s3://bucket/m") == "s3://bucket/m"
    assert url_of("a/b") is url_of("12:30/x") is url_of(f"file://{tmp_path}") is None
    assert local_path(f"file://{tmp_path}") == local_path(f"file:{tmp_path}") == tmp_path
    assert shown_url("ftp://me:secret@host/m?key=secret") == "ftp://host/m"
    with pytest.raises(ConfigError, match="'nothing://host/m' cannot be used") as error:
        EmbeddedRuntime().load("nothing://me:secret@host/m")
    assert "secret" not in str(error.value)
    with pytest.raises(ConfigError, match="Protocol not known: nothing; schemes are s3, gs, hdfs"):
        EmbeddedRuntime().load("nothing://host/m")
