"""A server that was started again remembers no base: the next delta holds everything and says so."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from psfleet.checkpoint import load_shard, read_manifest
from psfleet.core.base.errors import CheckpointError, DeadlineExceeded
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.trainings import PATIENCE, one_more, zero_rows
from tests.waiting import until

COUNTS = zero_rows("counts")
IDS = np.arange(100)
pytestmark = pytest.mark.timeout(600)  # processes start one after the other


def held(path: Path) -> list[float]:
    """The rows of a snapshot, with those that it builds on."""
    shard = Shard()
    load_shard(path, shard)
    table = shard.tables[COUNTS.key]
    assert isinstance(table, SparseTable)
    values: list[float] = table.rows(IDS).values[:, 0].tolist()
    return values


def test_a_delta_after_a_restart_holds_everything(tmp_path: Path) -> None:
    """Base, a server dies, delta, delta: the first of these needs no base, the second is small."""

    def push(count: int) -> None:
        runtime.push([one_more(COUNTS, IDS[:count])]).wait()

    with LocalFleet(2, 1, durability="log") as fleet, fleet.reviving():
        runtime = ClusterRuntime(fleet.environment(0), "async", patience=PATIENCE)
        runtime.create(COUNTS)
        push(100)
        runtime.save(str(tmp_path / "base"), base=True)
        push(10)
        fleet.kill(1)
        push(10)
        runtime.save(str(tmp_path / "whole"), delta=True)
        push(10)
        runtime.save(str(tmp_path / "delta"), delta=True)
        log = fleet.log(0)
        runtime.close()
        assert fleet.wait(300) == [0, 0]
    assert "was to be a delta and holds everything" in log
    assert "server 1" in log.partition("holds everything: ")[2]
    shutil.rmtree(tmp_path / "base")
    assert read_manifest(tmp_path / "whole").base is None
    assert held(tmp_path / "whole") == 10 * [3.0] + 90 * [1.0]
    assert read_manifest(tmp_path / "delta").base is not None
    assert held(tmp_path / "delta") == 10 * [4.0] + 90 * [1.0]


def test_a_snapshot_that_a_dead_server_had_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server 0 dies while one worker has heard of a snapshot and another has not: that is taken again."""

    def save() -> None:
        while True:
            with suppress(CheckpointError, DeadlineExceeded):  # given up, on a slow machine
                runtimes[0].save(str(tmp_path / "taken"))
                return

    with (
        LocalFleet(1, 2, durability="log") as fleet,
        fleet.reviving(),
        ThreadPoolExecutor() as pool,
    ):
        make = partial(ClusterRuntime, mode="async", patience=PATIENCE)
        runtimes = [*pool.map(make, map(fleet.environment, range(2)))]
        hears, deaf = (runtime._fleet.stream for runtime in runtimes)
        with monkeypatch.context() as patch:
            patch.setattr(deaf, "hears", lambda number: False)
            saved = pool.submit(save)
            until(lambda: hears.last_snapshot)
            begun = hears.last_snapshot
            fleet.kill(0)
        until(lambda: deaf.last_snapshot)
        assert deaf.last_snapshot > begun
        saved.result(300)
        [*pool.map(ClusterRuntime.close, runtimes)]
        assert fleet.wait(300) == [0]
    assert read_manifest(tmp_path / "taken").base is None
