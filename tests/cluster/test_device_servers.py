"""Servers that hold tables in a device's memory, under numba's simulator: the bits of the CPU, wherever."""

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from psfleet.core.base.errors import ConfigError, ServerUnavailable, UsageError
from psfleet.core.engine.rules import Adam
from psfleet.core.engine.runtime_interface import Gradient, Runtime, TableState
from psfleet.core.engine.schema.table import Device, InitializerSpec, TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests import starter
from tests.observability.test_processes import collect
from tests.trainings import TrainingWorkload, in_threads, same_bits

pytestmark = pytest.mark.long

SHORT = TrainingWorkload(
    steps=3, shape=(9, 7)
)  # the simulator runs a Python thread for each weight
LARGE = TrainingWorkload(steps=1, shape=(70, 61))  # two blocks, so that each server has one
LITTLE = "29K"  # room for some twenty rows of SHORT
Work = Callable[[Runtime], None]


class DeviceFleet(LocalFleet):
    """Server i is told PSFLEET_DEVICE=devices[i]; there is a simulated GPU, or none at all.

    memory: of it that the tables of a server may take.
    """

    def __init__(
        self, *devices: str, simulated: bool = True, memory: str = "", **settings: str
    ) -> None:
        super().__init__(len(devices), 2, **settings)  # type: ignore[arg-type]
        self._devices = devices
        self._simulated = simulated
        self._memory = memory

    def spawn(self, index: int, standby: int = 0, follows: bool = True):  # type: ignore[no-untyped-def]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PSFLEET_DEVICE", self._devices[index])
            patch.setenv("PSFLEET_DEVICE_MEMORY", self._memory)
            if self._simulated:
                patch.setenv("NUMBA_ENABLE_CUDASIM", "1")
            patch.setenv("CUDA_VISIBLE_DEVICES", "-1")
            return super().spawn(index, standby, follows)


def rows_in_host_memory(fleet: LocalFleet) -> float:
    """How many rows of the table of SHORT server 0 has no room for on its GPU."""
    return collect(fleet)["server", "0"][f"psfleet_spilled_rows{{{SHORT.sparse.name}}}"]


def train(
    fleet: LocalFleet, work_of: Work = SHORT.run, save: str = "", reads: bool = True
) -> list[TableState]:
    """Let every worker do this; the tables of SHORT that worker 0 then reads."""
    result: list[TableState] = []

    def work(worker: int) -> None:
        runtime = fleet.connect(worker, "sync")
        work_of(runtime)
        runtime.barrier()
        if worker == 0 and reads:
            result.extend(SHORT.result(runtime))
            if save:
                runtime.save(save)
        runtime.barrier()
        runtime.close()

    in_threads([partial(work, worker) for worker in range(fleet.workers)])
    assert fleet.wait() == [0] * fleet.servers
    return result


@pytest.fixture(scope="module", autouse=True)
def simulator_zygote() -> None:
    """Servers with a simulated GPU start as forks of a process that has it."""
    if subprocess.Popen is not starter.exec_popen:
        starter.start_simulator_zygote()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[TableState]]:
    """What servers in host memory end with after a training, and after another one behind it."""
    path = str(tmp_path_factory.mktemp("snapshots") / "snapshot")
    with LocalFleet(2, 2, in_process=True) as fleet:
        once = train(fleet, save=path)
    with LocalFleet(2, 2, resume=path, in_process=True) as fleet:
        return [once, train(fleet)]


def test_a_mixed_fleet_gives_the_same_bits() -> None:
    """A table of which one server holds a part on a GPU and one in host memory ends with the bits of two
    servers without a GPU."""
    states: list[TableState] = []

    def large(runtime: Runtime) -> None:
        LARGE.run(runtime)
        runtime.barrier()
        if runtime.worker_index == 0:
            states.extend(LARGE.result(runtime))
        runtime.barrier()

    for fleet in (DeviceFleet("cuda", "cpu"), LocalFleet(2, 2, in_process=True)):
        with fleet:
            train(fleet, large, reads=False)
    same_bits(states[:2], states[2:])


@pytest.mark.parametrize(
    ("before", "after"), [(("cuda", "cuda"), ("cpu",)), (("cpu", "cpu"), ("auto", "cuda"))]
)
def test_snapshots_move_between_devices(
    before: tuple[str], after: tuple[str], expected: list[list[TableState]], tmp_path: Path
) -> None:
    """A job that goes on from its snapshot on servers of the other kind, and of another number, ends with the
    bits of a job on the CPU."""
    path = str(tmp_path / "snapshot")
    with DeviceFleet(*before) as fleet:
        train(fleet, save=path)
    with DeviceFleet(*after, resume=path) as fleet:
        same_bits(train(fleet), expected[1])


def test_a_server_with_a_log_comes_back_on_its_device(
    expected: list[list[TableState]], tmp_path: Path
) -> None:
    """A server whose GPU has room for few of the rows is killed in the midst of training and goes on from its
    log with the same bits; a snapshot of it goes on without a GPU."""
    path, spilled = str(tmp_path / "snapshot"), []

    def crossed(runtime: Runtime) -> None:
        SHORT.run(runtime)
        runtime.barrier()
        if runtime.worker_index == 0:
            spilled.append(rows_in_host_memory(fleet))
            fleet.kill(0)
        runtime.barrier()

    with DeviceFleet("cuda", durability="log", memory=LITTLE) as fleet, fleet.reviving():
        same_bits(train(fleet, crossed, save=path), expected[0])
        assert fleet.restarts == 1
    assert spilled[0] > 50
    with LocalFleet(1, 2, resume=path, in_process=True) as fleet:
        same_bits(train(fleet), expected[1])


def test_a_missing_gpu_is_one_sentence() -> None:
    """A server that is told cuda says what is missing. One that is told auto uses the CPU and refuses a table
    that names cuda."""
    why = r"PSFLEET_DEVICE is 'cuda', but there is no usable NVIDIA GPU or driver here .*Say auto or cpu"
    with pytest.raises(ServerUnavailable, match=why), DeviceFleet("cuda", simulated=False):
        pass
    spec = TableSpec("w", "dense", (10,), Adam())
    asked = TableSpec("wanted", "dense", (10,), Adam(), device="cuda")

    def refused(runtime: Runtime) -> None:
        runtime.create(spec, np.zeros(10, np.float32))
        runtime.push([Gradient(spec.key, np.ones(10, np.float32), None, 0.1)])
        with pytest.raises(
            ConfigError, match="table 'wanted' asks for device='cuda', but there is no"
        ):
            runtime.create(asked, np.zeros(10, np.float32))
        runtime.flush()

    with DeviceFleet("auto", simulated=False) as fleet:
        train(fleet, refused, reads=False)


@pytest.mark.parametrize("setting", ["cuda", "auto"])
def test_dense_tables_share_the_memory_of_the_gpu(setting: str) -> None:
    """A dense table for which a server's GPU has no room is refused when it is made if the server is told
    cuda, and is in host memory if it is told auto. What it says of both memories is what they hold."""
    value = np.linspace(-1, 1, 1000, dtype=np.float32)
    small, large = (TableSpec(name, "dense", (n,), Adam()) for name, n in (("s", 500), ("l", 1000)))

    def both(runtime: Runtime) -> None:
        runtime.create(small, value[:500])
        if setting == "cuda":
            why = "'l' was asked to be made, for which it needs .* of the GPU's memory; this server"
            with pytest.raises(UsageError, match=why):
                runtime.create(large, value)
        else:
            runtime.create(large, value)
        runtime.barrier()
        if runtime.worker_index == 0:
            [stats], metrics = runtime.stats(), collect(fleet)["server", "0"]
            held = {t["name"]: (t["bytes"], t["device_bytes"]) for t in stats["tables"]}
            assert held.pop("s") == (10_000, 10_000)  # two moments and two gradients too
            assert held == ({} if setting == "cuda" else {"l": (12_000, 0)})
            assert metrics["psfleet_table_device_bytes{s}"] == 10_000
            assert metrics["psfleet_device_memory_used_bytes"] == 10_000
            assert metrics["psfleet_device_memory_limit_bytes"] == 16 << 10
            assert metrics["psfleet_memory_used_bytes"] == sum(host for host, _ in held.values())

    with DeviceFleet(setting, memory="16K") as fleet:
        train(fleet, both, reads=False)


def test_a_table_names_its_memory() -> None:
    """Of two tables one names the GPU and one the CPU, whatever the server's setting is; an equal definition
    with another device is the same table. So it is with sparse tables."""
    value, ids = np.linspace(-1, 1, 40, dtype=np.float32), np.arange(10)
    devices: list[Device] = ["cpu", "cuda"]
    specs = [TableSpec(f"on {d}", "dense", (40,), Adam(), device=d) for d in devices]
    start = InitializerSpec("constant", 0.5)
    rows = [
        TableSpec(f"rows {d}", "sparse", (4,), Adam(), initializer=start, device=d) for d in devices
    ]
    states: list[TableState] = []

    def both(runtime: Runtime) -> None:
        for spec in specs:
            runtime.create(spec, value)
        for spec in rows:
            runtime.create(spec)
        other = TableSpec("on cpu", "dense", (40,), Adam(), device="cuda")
        assert runtime.create(other, value) == specs[0].key
        for step in range(3):
            dense = [Gradient(spec.key, value * step, None, 0.1) for spec in specs]
            of_rows = (value * step).reshape(10, 4)
            runtime.push([*dense, *(Gradient(spec.key, of_rows, ids, 0.1) for spec in rows)])
        runtime.flush()
        runtime.barrier()
        if runtime.worker_index == 0:
            states.extend(
                runtime.read_table(spec.key)
                for pair in zip(specs, rows, strict=True)
                for spec in pair
            )
        runtime.barrier()

    with DeviceFleet("cpu") as fleet:
        train(fleet, both, reads=False)
    same_bits(states[:2], states[2:])
