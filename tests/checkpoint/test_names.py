"""No name of a table gets in the way of anything else that a snapshot or a folder holds."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from psfleet.checkpoint import Snapshot, export, reshard
from psfleet.core.base.errors import ConfigError
from psfleet.core.engine.rules.adam import Adam
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import MAX_NAME, TableSpec
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from psfleet_worker.session.retry_policy import Patience
from tests.trainings import in_threads

INTERNAL = ("server", "server/ids", "__metadata__", "state", "manifest.json", "manifest", "a/ids")
NASTY = (
    *("..", ".", "/", "a/../b", "/etc/passwd", "a\0b", "\n", "con", "a", "A", "é", "e\u0301"),
    *("\u202e", "x" * 512),
)
PATIENCE = Patience(reply=300.0, outage=300.0, start=300.0, leave=30.0)

names = st.one_of(
    st.sampled_from([*INTERNAL, *NASTY]),
    st.text(st.characters(codec="utf-8"), min_size=1).filter(
        lambda name: len(name.encode()) <= MAX_NAME
    ),
)


def tables(named: set[str]) -> list[TableSpec]:
    """A dense or a sparse table under each name."""
    kinds = [("dense", (3,)), ("sparse", (2,))]
    return [
        TableSpec(name, kinds[i % 2][0], kinds[i % 2][1], Adam())  # type: ignore[arg-type]
        for i, name in enumerate(sorted(named))
    ]


def opens(folder: Path) -> None:
    """What a server is beside its tables can be taken from each file."""
    snapshot = Snapshot(folder)
    for index in range(len(snapshot.manifest.files)):
        Shard().become(snapshot.server(index).shard)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(st.sets(names, min_size=1, max_size=6))
def test_any_names_come_back(tmp_path_factory: pytest.TempPathFactory, named: set[str]) -> None:
    """Tables of any names are saved, opened as a restart opens them, resharded, loaded and exported."""
    folder = tmp_path_factory.mktemp("names")
    runtime, specs = EmbeddedRuntime(), tables(named)
    for number, spec in enumerate(specs):
        value = np.full(spec.size, number, np.float32) if spec.kind == "dense" else None
        runtime.create(spec, value)
        ids = np.array([number, 5 + number]) if spec.kind == "sparse" else None
        runtime.push(
            [Gradient(spec.key, np.ones((2, 2) if ids is not None else 3, np.float32), ids, 0.1)]
        )
    runtime.save(str(folder / "one"))
    opens(folder / "one")
    reshard(str(folder / "one"), str(folder / "three"), 3)
    opens(folder / "three")
    again = EmbeddedRuntime()
    again.load(str(folder / "three"))
    for number, spec in enumerate(specs):
        reads = [Read(spec.key, None if spec.kind == "dense" else np.array([number, 5 + number]))]
        assert (again.pull(reads)[0] == runtime.pull(reads)[0]).all()
    files = export(str(folder / "one"), str(folder / "out"), "safetensors", ids=False)
    assert len({file.name.casefold() for file in files}) == len(specs)
    assert {file.parent for file in files} == {folder / "out"}
    assert all({"value"} <= load_file(file).keys() for file in files)


@pytest.mark.timeout(300)
def test_a_job_with_internal_names_survives_its_server() -> None:
    """Tables named like what is internal: a snapshot shortens the log, and a server comes back from it."""
    specs = [TableSpec(name, "dense", (40,), Adam()) for name in ("server", "server/value")]

    def work() -> None:
        runtime = ClusterRuntime(fleet.environment(0), "async", patience=PATIENCE)
        for spec in specs:
            runtime.create(spec, np.zeros(40, np.float32))
        for step in range(12):
            if step == 6:
                runtime.save("")
                assert not (fleet.snapshots.parent / "server.0.log").exists()
                fleet.kill(0)
            runtime.push([Gradient(one.key, np.ones(40, np.float32), None, 0.1) for one in specs])
        runtime.flush()
        assert [runtime.read_table(spec.key).step for spec in specs] == [12, 12]
        runtime.close()

    with LocalFleet(1, 1, durability="log") as fleet, fleet.reviving():
        in_threads([work])
        assert fleet.wait(60) == [0], fleet.log(0)
        assert fleet.restarts == 1


def test_a_log_stays_while_its_snapshot_cannot_be_opened(tmp_path: Path) -> None:
    """A snapshot that a server could not start from replaces neither the one before it nor the log."""
    runtime = EmbeddedRuntime()
    runtime.create(TableSpec("t", "dense", (3,), Adam()), np.zeros(3, np.float32))
    runtime.save(str(tmp_path / "model"))
    before = (tmp_path / "model" / "manifest.json").read_bytes()

    def spoil(self: object) -> None:
        raise TypeError("nobody expects this")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Shard, "become", lambda self, state: spoil(self))
        with pytest.raises(Exception, match="nobody expects this"):
            runtime.save(str(tmp_path / "model"))
    assert (tmp_path / "model" / "manifest.json").read_bytes() == before
    assert json.loads(before)["version"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_half_a_surrogate_pair_is_no_name() -> None:
    """A name that cannot be written as UTF-8 is refused in a sentence."""
    with pytest.raises(ConfigError, match="half of a surrogate pair"):
        TableSpec("a\ud800", "dense", (1,), Adam())
