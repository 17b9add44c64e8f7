"""`connect(job=...)`: processes without a seat read the tables of a job that trains."""

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import initializer
from psfleet.core.base.errors import (
    AccessDenied,
    ConfigError,
    ServerUnavailable,
    TableConflict,
    UnknownTable,
    UsageError,
)
from psfleet.core.client import Client
from psfleet.core.engine.schema.entry import (
    CapacityEntry,
    CountFilterEntry,
    EvictionStreamEntry,
    TTLEntry,
)
from psfleet.features import Feature, FeatureSet, Table
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD, Adam
from tests.programs import ended
from tests.trainings import TrainingWorkload, in_threads, same_bits
from tests.waiting import until

IDS, MISSING = np.arange(-20, 20), np.array([1000, 1001])
READER = [sys.executable, str(Path(__file__).parent / "scripts" / "reader.py")]


def job(fleet: LocalFleet) -> str:
    """The endpoints of a fleet."""
    return ",".join(fleet.endpoints)


@contextlib.contextmanager
def reading(fleet: LocalFleet, *tables: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that reads these tables again and again, from its first read until it is killed."""
    command = [*READER, job(fleet), " ".join(tables), str(10**6)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = process.stdout
        assert lines is not None
        drain = threading.Thread(target=lambda: [*lines], name="drain")
        try:
            assert lines.readline().startswith("read")
            drain.start()
            yield process
        finally:
            process.kill()
            process.wait()
            if drain.ident:
                drain.join()


def counts(ps: Client) -> list[tuple[int, list[int]]]:
    """By server its workers, and the rows or values of its tables."""
    return [(s["workers"], [table["count"] for table in s["tables"]]) for s in ps.stats()]


@pytest.mark.parametrize("mode", ["sync", pytest.param("ssp", marks=pytest.mark.long)])
def test_readers_change_nothing(mode: str) -> None:
    """Two processes read while a worker trains a table that admits and evicts rows; one of them is killed.
    Rows, state, ages and the servers' counts of workers and rows are those of a run that nobody reads."""
    entry = CountFilterEntry(2) & TTLEntry(steps=30) & CapacityEntry(rows=60)
    states = []
    for readers in (False, True):
        with LocalFleet(2, 1, in_process=True) as fleet, contextlib.ExitStack() as stack:
            ps = stack.enter_context(Client(fleet.connect(0, mode)))
            table = ps.sparse_table("t", 4, Adam(0.1), entry=entry)
            if readers:
                stack.enter_context(reading(fleet, "t"))
            for step in range(60):
                if readers and step == 20:
                    with reading(fleet, "t") as process:
                        process.kill()
                ids = np.random.default_rng(step).integers(-50, 150, 30)
                rows = table.pull(ids)
                table.push(ids, rows * np.float32(0.1) + np.float32(1)).wait()
            ps.flush()
            state = ps.runtime.read_table(table.spec.key)
            assert state.ids is not None
            assert state.touched is not None
            parts: list[Any] = [state.ids, state.touched, *state.values]
            states.append(([part.tobytes() for part in parts], state.step, counts(ps)))
    assert states[0] == states[1]


def test_sync_training_keeps_its_bits() -> None:
    """Two workers and two servers in sync mode, beside a process that reads: the bits of a run without it."""
    results = []
    for read in (False, True):
        workload = TrainingWorkload(steps=15)
        with LocalFleet(2, 2, in_process=True) as fleet, contextlib.ExitStack() as stack:
            runtimes = [fleet.connect(worker, "sync") for worker in range(2)]
            for runtime in runtimes:
                runtime.create(workload.sparse)
            if read:
                stack.enter_context(reading(fleet, "training/sparse"))
            in_threads([functools.partial(workload.run, one) for one in runtimes])
            results.append(workload.result(runtimes[0]))
            in_threads([one.close for one in runtimes])
            assert fleet.wait() == [0, 0]  # the servers end with their workers, whoever reads
    same_bits(*results)


def test_a_pull_is_of_one_round() -> None:
    """Sync mode: whatever a reader gets as one round are the bits that the worker has pulled after it; the
    steps of its tables say the same."""
    rounds: dict[int, tuple[bytes, bytes]] = {}
    seen: list[tuple[Any, tuple[bytes, bytes]]] = []
    over = threading.Event()
    with LocalFleet(2, 1, in_process=True) as fleet, Client(fleet.connect(0, "sync")) as ps:
        rows = ps.sparse_table("rows", 4, Adam(0.1))
        dense = ps.dense_table("dense", np.ones(100_000, np.float32), SGD(0.1))

        def read() -> None:
            with psfleet.connect(job=job(fleet)) as reader:
                tables = {reader.sparse_table("rows"): IDS, reader.dense_table("dense"): None}
                while not over.is_set():
                    values = [one.tobytes() for one in reader.pull(tables).values()]
                    seen.append((reader.version, (values[0], values[1])))

        def train() -> None:
            try:
                for number in range(1, 10_000):
                    values = ps.pull({rows: IDS, dense: None})
                    ps.push({rows: (IDS, values[rows] + 1), dense: values[dense] * 0.5})
                    again = ps.pull({rows: IDS, dense: None})
                    rounds[number] = again[rows].tobytes(), again[dense].tobytes()
                    if number >= 30 and sum(version.is_cut for version, _ in seen) >= 5:
                        return
            finally:
                over.set()

        in_threads([read, train])
    cuts = [(version, values) for version, values in seen if version.is_cut]
    assert len(cuts) >= 5
    for version, values in cuts:
        number = version.rounds[0]
        assert values == rounds[number]
        assert version.steps == {"rows": (number, number), "dense": (number, number)}


def test_values_and_features() -> None:
    """Widths come from the job; ids without a row have the first values of training and get no row; features
    without an optimizer are pooled; `wire` rounds the values."""
    with LocalFleet(2, 1, in_process=True) as fleet, Client(fleet.connect(0, "async")) as ps:
        start = initializer.Normal(scale=0.5, seed=3)
        users = ps.sparse_table("users", 3, Adam(0.1), start)
        bias = ps.dense_table("bias", np.arange(5), SGD(0.1))
        users.push(IDS, np.ones((40, 3))).wait()
        before = counts(ps)
        with psfleet.connect(job=fleet.endpoints) as reader:
            assert reader.version is None
            actual = reader.sparse_table("users")
            assert (actual.spec.dim, actual.spec.initializer) == (3, users.spec.initializer)
            both = np.concatenate([IDS, MISSING])
            assert actual.pull(both).tobytes() == users.pull(both).tobytes()
            assert reader.version is not None
            assert reader.version.rounds == (0, 0)
            assert not reader.version.is_cut
            assert reader.version.steps == {"users": (1, 1)}
            assert reader.dense_table("bias").pull().tobytes() == bias.pull().tobytes()
            features = FeatureSet([Feature("user", Table("users", 3), pooling="mean")])
            batch = reader.features(features).batch({"user": [[1, 2], [], [1000]]})
            pooled = batch.pool(reader.pull(batch.ids))["user"]
            rows = users.pull([1, 2, 1000])
            expected = np.stack([rows[:2].mean(0), np.zeros(3), rows[2]])
            np.testing.assert_allclose(pooled, expected.astype(np.float32), rtol=1e-6)
        with psfleet.connect(job=fleet.endpoints, wire="bf16") as reader:
            short = reader.sparse_table("users").pull(IDS)
            assert not (short.view(np.uint32) & 0xFFFF).any()
            np.testing.assert_allclose(short, users.pull(IDS), rtol=2.0**-8)
        assert counts(ps) == before


@pytest.mark.parametrize("mode", ["geo", "half-async"])
def test_modes_that_work_on_copies(mode: str) -> None:
    """A reader gets what the servers have, once a worker's own changes have reached them."""
    with LocalFleet(2, 1, in_process=True) as fleet, Client(fleet.connect(0, mode)) as ps:
        users = ps.sparse_table("users", 3, SGD(0.1))
        for _ in range(5):
            users.push(IDS, np.ones((40, 3)))
        state = ps.runtime.read_table(users.spec.key)
        assert state.ids is not None
        with psfleet.connect(job=job(fleet)) as reader:
            rows = reader.sparse_table("users").pull(state.ids)
            assert reader.version is not None
            assert reader.version.steps["users"][0] > 0
        assert rows.tobytes() == state.values[0].tobytes()


@pytest.mark.parametrize("starter", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_a_script_that_does_not_close(starter: str) -> None:
    """Its process ends nevertheless, also where it is a new interpreter."""
    with LocalFleet(1, 1, in_process=True) as fleet, Client(fleet.connect(0, "async")) as ps:
        ps.sparse_table("users", 3, SGD(0.1)).push(IDS, np.ones((40, 3))).wait()
        environment = {**os.environ, "PSFLEET_TEST_STARTER": starter}
        process = ended([*READER, job(fleet), "users", "3"], env=environment)
        assert process.returncode == 0, process.stderr
        assert process.stdout.count("read") == 3


def test_evicted_ids() -> None:
    """A reader gets the stream of a table's evictions, beside whoever else reads it."""
    entry = CapacityEntry(rows=40) & EvictionStreamEntry(keep=1000)
    with LocalFleet(2, 1, in_process=True) as fleet, Client(fleet.connect(0, "async")) as ps:
        users = ps.sparse_table("users", 3, SGD(0.1), entry=entry)
        for first in range(0, 200, 10):
            users.push(np.arange(first, first + 10), np.ones((10, 3))).wait()
        gone = [one.ids.tolist() for one in users.evictions()]
        assert gone
        with psfleet.connect(job=job(fleet)) as reader:
            stream = reader.sparse_table("users").evictions()
            assert [one.ids.tolist() for one in stream] == gone


def test_a_server_that_restarts() -> None:
    """A reader goes on with the same values when the launcher has started a killed server again."""
    with LocalFleet(2, 1, durability="log") as fleet, Client(fleet.connect(0, "sync")) as ps:
        users = ps.sparse_table("users", 3, Adam(0.1))
        users.push(IDS, np.ones((40, 3)))
        before = users.pull(IDS).tobytes()
        with psfleet.connect(job=job(fleet)) as reader, fleet.reviving():
            table = reader.sparse_table("users")
            assert table.pull(IDS).tobytes() == before
            for server in (1, 0):
                fleet.kill(server)
                assert table.pull(IDS).tobytes() == before
            until(lambda: fleet.restarts == 2)
            users.push(IDS, np.ones((40, 3)))
            after = users.pull(IDS).tobytes()
            assert after != before
            assert table.pull(IDS).tobytes() == after


def test_over_tls() -> None:
    """With the job's certificates and token, and not without."""
    with (
        LocalFleet(2, 1, transport="tcp", in_process=True) as fleet,
        Client(fleet.connect(0, "async")) as ps,
    ):
        users = ps.sparse_table("users", 3, Adam(0.1))
        users.push(IDS, np.ones((40, 3))).wait()
        tls = str(fleet.credentials["worker"])
        with psfleet.connect(job=job(fleet), tls=tls) as reader:
            assert reader.sparse_table("users").pull(IDS).tobytes() == users.pull(IDS).tobytes()
        with pytest.raises(ConfigError, match="TCP needs credentials"):
            psfleet.connect(job=job(fleet))
        with pytest.raises((AccessDenied, ServerUnavailable)):
            psfleet.connect(job=job(fleet), insecure=True)


WRITES: dict[str, Callable[[Client, Any], object]] = {
    "be pushed to": lambda ps, table: table.push(IDS, np.ones((40, 3))),
    "be written to": lambda ps, table: table.write(IDS, np.ones((40, 3))),
    "be loaded into": lambda ps, table: ps.runtime.load("anywhere"),
    "be saved": lambda ps, table: ps.save("anywhere"),
    "be shrunk": lambda ps, table: ps.runtime.shrink(),
    "be put into another mode": lambda ps, table: ps.set_mode("async"),
}


def test_what_is_refused() -> None:
    """All that would change the job is one sentence, also of a table with an optimizer; a reader meets
    nobody, and there must be the table."""
    with LocalFleet(2, 1, in_process=True) as fleet, Client(fleet.connect(0, "sync")) as ps:
        ps.sparse_table("users", 3, Adam(0.1)).push(IDS, np.ones((40, 3))).wait()
        before = counts(ps)
        with psfleet.connect(job=job(fleet)) as reader:
            table = reader.sparse_table("users", 3, Adam(0.1))
            for what, change in WRITES.items():
                with pytest.raises(
                    UsageError, match=f"the job at .* read only, and cannot {what}; a wor"
                ):
                    change(reader, table)
            with pytest.raises(UsageError, match="opened without an optimizer"):
                reader.sparse_table("users").push(IDS, np.ones((40, 3)))
            collectives: list[Callable[[], object]] = [
                reader.barrier,
                lambda: reader.load("anywhere"),
            ]
            for collective in collectives:
                with pytest.raises(UsageError, match="has no seat there and meets no workers"):
                    collective()
            with pytest.raises(UnknownTable, match=r"no table 'items', .* the tables are: users$"):
                reader.sparse_table("items", 3, Adam(0.1))
            with pytest.raises(TableConflict, match=r"the script declares it sparse of shape \(4,"):
                reader.sparse_table("users", 4, Adam(0.1))
        assert counts(ps) == before


def test_wrong_servers(tmp_path: Path) -> None:
    """Fewer endpoints, or in another order, would look for rows where they are not; and what is no job."""
    with LocalFleet(2, 1, in_process=True) as fleet:
        one, other = fleet.endpoints
        for wrong, said in (
            ([one], "server 0 of 2"),
            ([other, one], "server 1 of 2, server 0 of 2"),
        ):
            with pytest.raises(ConfigError, match=f"those of {said}; name all servers of one job"):
                psfleet.connect(job=wrong)
        with pytest.raises(ConfigError, match="and an environment, a mode or a checkpoint"):
            psfleet.connect(job=[one, other], mode="sync")
    with pytest.raises(ConfigError, match="no job runs in"):
        psfleet.connect(job=tmp_path)
    for nothing in ("no/folder", ["host"]):
        with pytest.raises(
            ConfigError, match="neither the folder of a job's logs nor the endpoints"
        ):
            psfleet.connect(job=nothing)


def test_a_job_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader is told so when the servers have not answered for a while."""
    monkeypatch.setattr("psfleet_worker.reader_runtime._OUTAGE", 0.5)
    with LocalFleet(1, 1, in_process=True) as fleet, Client(fleet.connect(0, "async")) as ps:
        ps.sparse_table("users", 3, Adam(0.1)).push(IDS, np.ones((40, 3))).wait()
        with psfleet.connect(job=job(fleet)) as reader:
            table = reader.sparse_table("users")
            ps.close()
            assert fleet.wait() == [0]
            with pytest.raises(
                ServerUnavailable, match="the job has ended, or this server is down"
            ):
                table.pull(IDS)
