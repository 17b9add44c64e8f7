"""Reads samples through fleet.dataset for two epochs, and may be killed. Says what was used.

python samples_dying.py FOLDER JOB [DEATH]            # Parquet files, shuffled
python samples_dying.py batches:FOLDER JOB [DEATH]    # RecordBatches of the files, an iterable
python samples_dying.py kafka://SERVERS JOB [DEATH]   # the topic "rows", which has two partitions
python samples_dying.py grows://SERVERS JOB [DEATH]   # likewise, without an end; all but one are found

JOB is the job's folder. DEATH is VICTIM:WORKER:STEP:PLACE: at this step, behind its pull or its push, this
worker kills itself ("worker"), or the launcher and thereby the whole job ("job"). The latter waits for a
step at which the job has a complete snapshot.
"""

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import psfleet
from psfleet import fleet, initializer
from psfleet.features import Feature, FeatureSet, Table
from psfleet.optimizer import SGD

ROWS, EPOCHS, WORKERS = 120, 2, 3
GROWS = "grows://"
PAUSE = 1.0  # seconds that a step waits for the snapshot: there are a dozen such steps


def feature_set(worker: int) -> FeatureSet:
    """Only this worker names its table: under SGD with rate 1 it counts the worker's uses of each row."""
    counts = Table(f"counts_{worker}", 1, SGD(1.0), initializer.Constant(0.0))
    return FeatureSet([Feature("row", counts)])


def opened(place: str, features: FeatureSet) -> Any:
    """The source."""
    if place.startswith("kafka://"):
        from psfleet.data.kafka import KafkaTopic

        ends = {0: ROWS // 2, 1: ROWS - ROWS // 2}
        servers = place.removeprefix("kafka://")
        return KafkaTopic(
            servers, "rows", features, ["label"], start={0: 0, 1: 0}, end=ends, bad_messages="skip"
        )
    if place.startswith(GROWS):
        return growing(place.removeprefix(GROWS), features)
    from psfleet.data.parquet import ParquetFiles

    if place.startswith("batches:"):
        import pyarrow.dataset

        from psfleet.data.record_batches import RecordBatches

        rows = pyarrow.dataset.dataset(place.removeprefix("batches:"))
        return RecordBatches(rows.to_batches, features, ["label"], bad_rows="skip")
    return ParquetFiles(place, features, ["label"], bad_rows="skip", interleave=2)


def growing(servers: str, features: FeatureSet) -> Any:
    """A topic of which each worker sees the partitions one by one, worker 1 always one more than worker 0.

    The broker of the tests cannot add some; all are there.
    """
    from psfleet.data import kafka, kafka_partition

    asked = itertools.count(1 + fleet.worker_index())
    kafka._SECTION = 4

    def count(self: kafka_partition.Partition) -> int:
        return min(next(asked), 3)

    kafka_partition.Partition.count = count  # type: ignore[method-assign]
    return kafka.KafkaTopic(
        servers, "rows", features, ["label"], start={0: 0}, find_partitions=True
    )


class Death:
    """Kills once in a job.

    Args:
        text: See above; empty: it never does.
        job: The job's folder.
        me: Which worker this is.
    """

    def __init__(self, text: str, job: Path, me: int) -> None:
        self._victim, worker, step, self._place = (text or "nobody:-1:0:").split(":")
        self._step, self._job = int(step), job
        self._mark = self._job / "died"
        self._mine = int(worker) == me and not self._mark.exists()

    def at(self, step: int, place: str) -> None:
        """The worker is there."""
        if not self._mine or step < self._step or place != self._place:
            return
        if self._victim == "job" and not self._has_snapshot():
            return
        self._mark.touch()
        os.kill(os.getppid() if self._victim == "job" else os.getpid(), signal.SIGKILL)
        signal.pause()  # the kernel kills the children of the launcher

    def _has_snapshot(self) -> bool:
        until = time.monotonic() + PAUSE
        while not any(self._job.glob("snapshots/snapshot-*/manifest.json")):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True


def used(tables: Any) -> Any:
    """How often each row was used."""
    rows = np.arange(ROWS)
    return np.sum([table.pull(rows) for table in tables], 0).reshape(-1).astype(int)


def main(place: str, job: Path, death: str = "") -> None:
    """One worker."""
    fleet.init()
    me = fleet.worker_index()
    source = opened(place, feature_set(me))
    seed = None if place.startswith(("kafka:", GROWS, "batches:")) else 3
    epochs = 1 if place.startswith(GROWS) else EPOCHS
    kill = Death(death, job, me)
    with psfleet.connect() as ps:
        sets = [ps.features(feature_set(worker)) for worker in range(WORKERS)]
        counts = [features.tables[f"counts_{w}"] for w, features in enumerate(sets)]
        batches = fleet.dataset(source, 5, epochs, seed, prefetch=2)
        for step, samples in enumerate(batches, 1):
            batch = sets[me].batch(samples.features)
            batch.pool(ps.pull(batch.ids))
            kill.at(step, "pulled")
            gradient = np.full((batch.samples, 1), -1, np.float32)
            ps.push(batch.gradients({"row": gradient}))
            kill.at(step, "pushed")
            if (
                place.startswith(GROWS) and used(counts).all()
            ):  # alike for all workers, in sync mode
                break
        ps.flush()
        ps.barrier()
        if me == 0:
            print("used", used(counts).tolist())
        ps.barrier()


main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
