"""Reads samples through fleet.dataset; worker 1 is killed at its fourth step. Says what was used.

python samples_dying.py FOLDER MARK            # Parquet files, shuffled
python samples_dying.py kafka://SERVERS MARK   # the topic "rows", which has two partitions
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

import psfleet
from psfleet import fleet, initializer
from psfleet.features import Feature, FeatureSet, Table
from psfleet.optimizer import SGD

ROWS, EPOCHS, WORKERS = 60, 2, 2


def feature_set(worker: int) -> FeatureSet:
    """Only this worker names its table: under SGD with rate 1 it counts the worker's uses of each row."""
    counts = Table(f"counts_{worker}", 1, SGD(1.0), initializer.Constant(0.0))
    return FeatureSet([Feature("row", counts)])


def opened(place: str, features: FeatureSet) -> Any:
    """The source."""
    if place.startswith("kafka://"):
        from psfleet.datasets.kafka import KafkaTopic

        ends = {0: ROWS // 2, 1: ROWS - ROWS // 2}
        servers = place.removeprefix("kafka://")
        return KafkaTopic(
            servers, "rows", features, ["label"], start={0: 0, 1: 0}, end=ends, bad_messages="skip"
        )
    from psfleet.datasets.parquet import ParquetFiles

    return ParquetFiles(place, features, ["label"], bad_rows="skip", interleave=2)


def main(place: str, mark: Path) -> None:
    """One worker."""
    fleet.init()
    me = fleet.worker_index()
    source = opened(place, feature_set(me))
    seed = None if place.startswith("kafka://") else 3
    with psfleet.connect() as ps:
        sets = [ps.features(feature_set(worker)) for worker in range(WORKERS)]
        batches = fleet.dataset(source, 5, EPOCHS, seed, prefetch=2)
        for step, samples in enumerate(batches, 1):
            batch = sets[me].batch(samples.features)
            batch.pool(ps.pull(batch.ids))
            if (me, step) == (1, 4) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            gradient = np.full((batch.samples, 1), -1, np.float32)
            ps.push(batch.gradients({"row": gradient}))
        ps.flush()
        ps.barrier()
        if me == 0:
            ids = np.arange(ROWS)
            tables = [features.tables[f"counts_{w}"] for w, features in enumerate(sets)]
            used = sum(table.pull(ids) for table in tables)
            print("used", np.asarray(used).reshape(-1).astype(int).tolist())
        ps.barrier()


main(sys.argv[1], Path(sys.argv[2]))
