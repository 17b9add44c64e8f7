"""A push that a server refuses is lost by itself: everything else goes on."""

import contextlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.core.base.errors import UsageError
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.kernels.id_routing import owned_by
from psfleet.core.engine.rules import SGD, Adam
from psfleet.core.engine.runtime_interface import Gradient, PendingPush, Read, Runtime
from psfleet.core.engine.schema.entry import CapacityEntry
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.trainings import in_threads

ROWS = TableSpec("rows", "sparse", (4,), Adam(), entry=CapacityEntry(rows=300, full="refuse"))
OTHER = TableSpec("other", "sparse", (4,), Adam())
DENSE = TableSpec("dense", "dense", (64,), Adam())
SUM = TableSpec("sum", "dense", (3,), SGD())
IDS = np.arange(100)


def begin(runtime: Runtime) -> None:
    runtime.create(ROWS)
    runtime.create(OTHER)
    runtime.create(DENSE, np.zeros(64, np.float32))


def push(runtime: Runtime, ids: NDArray[np.int64], value: float = 1.0) -> PendingPush:
    values = np.full((len(ids), 4), value, np.float32)
    rows = [Gradient(spec.key, values, ids, 0.1) for spec in (ROWS, OTHER)]
    return runtime.push([*rows, Gradient(DENSE.key, np.full(64, value, np.float32), None, 0.1)])


def state(runtime: Runtime) -> list[bytes]:
    """All tables."""
    tables = [runtime.read_table(spec.key) for spec in (ROWS, OTHER, DENSE)]
    return [values.tobytes() for table in tables for values in table.values]


def saved_and_loaded(runtime: Runtime, folder: Path) -> None:
    """A save holds all that is there."""
    before = state(runtime)
    runtime.save(str(folder))
    runtime.load(str(folder))
    assert state(runtime) == before


@pytest.mark.parametrize(
    ("servers", "mode"), [(1, "sync"), (3, "async"), (1, "ssp"), (3, "half-async"), (3, "geo")]
)
def test_everything_else_goes_on(servers: int, mode: Mode, tmp_path: Path) -> None:
    """After refusals a worker pulls, pushes, meets, saves and leaves; each refusal is said once."""
    with LocalFleet(servers=servers, workers=1, in_process=True) as fleet:
        with contextlib.closing(fleet.connect(0, mode)) as runtime:
            begin(runtime)
            push(runtime, IDS)
            runtime.flush()
            for number in range(3):
                push(runtime, 1000 * number + np.arange(1000))
                with pytest.raises(UsageError, match=r"was refused.*'rows' is full"):
                    runtime.flush()
                runtime.flush()
                assert runtime.pull([Read(ROWS.key, IDS)])[0].shape == (100, 4)
                push(runtime, IDS)
                runtime.barrier()
            saved_and_loaded(runtime, tmp_path / "model")
            push(runtime, IDS)
        assert fleet.wait(60) == [0] * servers


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_ticket_or_a_pull_says_it(mode: Mode) -> None:
    """Whoever waits first is told of the refusals: then nothing is left to be said."""
    with (
        LocalFleet(servers=2, workers=1, in_process=True) as fleet,
        contextlib.closing(fleet.connect(0, mode)) as runtime,
    ):
        begin(runtime)
        with pytest.raises(UsageError, match="push 1 was refused"):
            push(runtime, np.arange(1000)).wait()
        runtime.pull([Read(ROWS.key, IDS)])
        for number in range(1 if mode == "sync" else 3):
            push(runtime, 1000 * number + np.arange(1000))
        more = "" if mode == "sync" else r".*\(so were 2 pushes after it\)"
        with pytest.raises(UsageError, match="push 2 was refused.*" + more):
            runtime.pull([Read(ROWS.key, IDS)])
        push(runtime, IDS)
        assert runtime.pull([Read(ROWS.key, IDS)])[0].any()


@pytest.mark.parametrize(
    ("mode", "settings"), [("async", {}), ("ssp", {}), ("half-async", {}), ("geo", {"k_steps": 1})]
)
def test_a_push_that_says_it_is_not_sent(mode: Mode, settings: dict[str, int]) -> None:
    """A script that makes it again counts each of its gradients once, and none is lost."""
    with (
        LocalFleet(servers=1, workers=1, in_process=True) as fleet,
        contextlib.closing(fleet.connect(0, mode, **settings)) as runtime,
    ):
        begin(runtime)
        runtime.create(SUM, np.zeros(3, np.float32))
        pushed, said = 0, 0
        push(runtime, np.arange(1000))
        while not said or pushed % 8:
            gradient = Gradient(SUM.key, np.full(3, -1.0, np.float32), None, 1.0)
            try:
                runtime.push([gradient])
            except UsageError:
                said += 1
                runtime.push([gradient])
            pushed += 1
            assert pushed < 1000
        runtime.flush()
        assert said == 1
        assert runtime.pull([Read(SUM.key)])[0].tolist() == [pushed] * 3


@pytest.mark.parametrize("durability", ["none", "log"])
def test_no_server_takes_a_part_in_sync_mode(durability: str) -> None:
    """A push that one of two servers refuses leaves the round as if its worker had pushed nothing.

    Also if the servers die then and restart from their logs.
    """
    full = np.arange(2000)
    full = full[owned_by(full, 1, 2)]

    def train(refuses: bool) -> list[bytes]:
        here = durability == "none"
        with LocalFleet(servers=2, workers=2, durability=durability, in_process=here) as fleet:
            runtimes: dict[int, Runtime] = {}

            def begin_both(worker: int) -> None:
                runtimes[worker] = fleet.connect(worker, "sync")
                begin(runtimes[worker])
                push(runtimes[worker], IDS + 50 * worker)
                runtimes[worker].flush()

            def refused(worker: int) -> None:
                if worker == 0 and refuses:
                    push(runtimes[0], np.append(IDS, full[full >= 200]), 9.0)
                    with pytest.raises(UsageError, match=r"push 2 was refused: .*'rows' is full"):
                        runtimes[0].flush()
                elif worker == 0:
                    runtimes[0].push([])
                else:
                    push(runtimes[1], IDS)
                runtimes[worker].flush()

            def end(worker: int) -> None:
                push(runtimes[worker], IDS)
                runtimes[worker].flush()
                runtimes[worker].barrier()

            with fleet.reviving() if durability == "log" else contextlib.nullcontext():
                for step in (begin_both, refused):
                    in_threads([partial(step, worker) for worker in range(2)])
                if durability == "log":
                    for process in fleet.processes:
                        process.kill()
                in_threads([partial(end, worker) for worker in range(2)])
                actual = state(runtimes[0])
                in_threads([runtimes[worker].close for worker in range(2)])
                return actual

    assert train(refuses=True) == train(refuses=False)


def test_embedded(tmp_path: Path) -> None:
    """Without servers nothing of a refused push is taken, and everything else goes on."""
    runtime = EmbeddedRuntime()
    begin(runtime)
    push(runtime, IDS)
    before = state(runtime)
    for number in range(3):
        with pytest.raises(UsageError, match="'rows' is full"):
            push(runtime, 1000 * number + np.arange(1000))
        assert state(runtime) == before
    saved_and_loaded(runtime, tmp_path / "model")
    push(runtime, IDS)
    assert runtime.pushes == 2


def test_a_push_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push whose message the servers refuse unread is lost by itself too."""
    monkeypatch.setenv("PSFLEET_LANE", "inline")
    with (
        LocalFleet(servers=2, workers=1, limits="message=20000", in_process=True) as fleet,
        contextlib.closing(fleet.connect(0, "async")) as runtime,
    ):
        begin(runtime)
        push(runtime, IDS)
        for number in range(3):
            push(runtime, 1000 * number + np.arange(5000))
            with pytest.raises(UsageError, match=r"push .* was refused"):
                runtime.flush()
            push(runtime, IDS)
            runtime.flush()
        assert runtime.pull([Read(ROWS.key, IDS)])[0].any()
        assert runtime.read_table(DENSE.key).step == 4
