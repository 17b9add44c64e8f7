"""Rows in 16 bits have the same bits on any fleet, after deaths, and after a snapshot."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from psfleet.checkpoint import load_shard
from psfleet.core.base.errors import TableConflict
from psfleet.core.client import Client
from psfleet.core.engine.runtime_interface import TableState
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.trainings import TrainingWorkload, in_threads, same_bits

TRAINING = TrainingWorkload(steps=12, precision="bfloat16/bfloat16")
PARTS = 3  # a training has so many, and may go on from a snapshot before each


def train(fleet: LocalFleet, parts: int = PARTS, folder: Path | None = None) -> list[TableState]:
    """Sync training by every worker; the tables that worker 0 then reads.

    folder: A snapshot of the first part is written there, then a delta after each other one.
    """
    result: list[TableState] = []

    def work(worker: int) -> None:
        runtime = ClusterRuntime(fleet.environment(worker), "sync")
        for part in range(parts):
            TRAINING.run(runtime)
            runtime.barrier()
            if folder is not None and worker == 0:
                runtime.save(str(folder / str(part)), delta=part > 0, base=True)
            runtime.barrier()
        if worker == 0:
            result.extend(TRAINING.result(runtime))
        runtime.barrier()
        runtime.close()

    in_threads([partial(work, worker) for worker in range(fleet.workers)])
    return result


@pytest.fixture(scope="module")
def expected() -> list[TableState]:
    """The result of 2 workers with one server and no fault."""
    with LocalFleet(servers=1, workers=2, in_process=True) as fleet:
        return train(fleet)


def test_the_rows_are_in_16_bits(expected: list[TableState]) -> None:
    """Every weight and state value ends in 16 zero bits: nobody keeps more of them elsewhere."""
    values = np.concatenate(expected[1].values)
    assert values.size > 1000
    assert not (values.view(np.uint32) & np.uint32(0xFFFF)).any()


def test_a_fleet_goes_on_from_a_snapshot_with_the_same_bits(
    expected: list[TableState], tmp_path: Path
) -> None:
    """Two servers write a snapshot and a delta; three start from the delta."""
    with LocalFleet(2, 2, in_process=True) as fleet:
        half = train(fleet, PARTS - 1, tmp_path)
    shard = Shard()
    load_shard(tmp_path / "1", shard)
    table = shard.tables[TRAINING.sparse.key]
    assert isinstance(table, SparseTable)
    np.testing.assert_array_equal(table.state(0, 1000)[1], np.concatenate(half[1].values, axis=1))
    with LocalFleet(3, 2, resume=str(tmp_path / "1"), in_process=True) as fleet:
        same_bits(train(fleet, 1), expected)


def test_a_table_of_another_precision_is_refused() -> None:
    """In one sentence; the table that is there stays as it is."""
    client = Client(EmbeddedRuntime())
    client.sparse_table("rows", 16, SGD(0.1), precision="bfloat16")
    with pytest.raises(
        TableConflict, match="its precision is bfloat16, not float32; declare it alike"
    ):
        client.sparse_table("rows", 16, SGD(0.1))
