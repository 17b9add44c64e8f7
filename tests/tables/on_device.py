"""A plugin of pytest (-p tests.tables.on_device): tables that name no device are on one, if a device can
have them.

With PSFLEET_TEST_GPU=1 that is a GPU, all of which --device-room=0 gives to tables. Else it is a simulated
one: numba's, with NUMBA_ENABLE_CUDASIM=1, or the one of tests/kernels/driver.c, where that is the driver.
Tables of a shard, and of each server that a test starts, share as little of its memory as --device-room says,
so that rows may be in host memory. Kernels are compiled for the processor (compiled_kernels.py); with that
driver they run from the parameters of their launches (driven_kernels.py). With --device-order the simulated
device's streams do their work late, in an order drawn from this seed (device_order.py).
"""

import os
import subprocess
from functools import partial

import numba.cuda  # noqa: F401  # it starts a program when it is first imported, which no quick test may
import pytest

from psfleet.core.engine.kernels.device.cuda_arithmetic import SIMULATED
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.budget import MemoryBudget
from psfleet.core.engine.tables.memory_choice import why_no_gpu
from psfleet.core.engine.tables.row_memory import RowMemory
from psfleet.core.engine.tables.row_update import RowUpdate
from tests import starter
from tests.tables import compiled_kernels

_LITTLE = (
    512 << 10
)  # bytes: for the dense tables of tests, which have to be there whole, and some thousand rows

_NOT_ON_A_DEVICE = {
    "tables/test_arena.py": "it is of the reserved memory of the host",
    "tables/test_memory.py": "it limits host memory",
    "tables/test_device.py": "it is of tables that name no device",
    "tables/test_disk.py": "it is of tables whose server keeps rows on disk",
    "tables/test_refusals.py::test_definitions": "it is of a process without a GPU",
    "shard/test_room.py": "it limits host memory",
    "tables/test_sparse.py::test_a_table_takes_the_address_space_there_is": "it limits the host's addresses",
    "tables/test_sparse.py::test_churn_of_chosen_ids": "each segment of its index has a size of its own, "
    "so it takes ids that the index of the host refuses",
}
"""Tests that mean host memory, and why."""

_ON_A_GPU = os.environ.get("PSFLEET_TEST_GPU") == "1"
assert not why_no_gpu(), why_no_gpu()
if SIMULATED:
    compiled_kernels.install()
elif not _ON_A_GPU:
    from tests.kernels import driven_kernels

    driven_kernels.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    """What the device is like."""
    group = parser.getgroup("device", "tables on a simulated device")
    help_room = "bytes of it for the tables of a shard or server; 0: no limit"
    group.addoption("--device-room", type=int, default=_LITTLE, metavar="BYTES", help=help_room)
    help_order = "do its work late, in an order drawn from this seed"
    group.addoption("--device-order", type=int, metavar="SEED", help=help_order)


def pytest_configure(config: pytest.Config) -> None:
    """Make it so."""
    room, seed = config.getoption("--device-room"), config.getoption("--device-order")
    os.environ["PSFLEET_DEVICE"] = "auto"
    os.environ["PSFLEET_DEVICE_MEMORY"] = str(room or "")
    if not SIMULATED:
        pass
    elif seed is None:
        compiled_kernels.use(compiled_kernels.CompiledOperations())
    else:
        from tests.tables.device_order import BUFFERS, HALF, LateOperations

        class LateCompiledOperations(LateOperations, compiled_kernels.CompiledOperations):
            pass

        compiled_kernels.use(LateCompiledOperations(seed), BUFFERS, HALF)
    if not _ON_A_GPU:
        compiled_kernels.start_threads()

    from psfleet.core.engine.tables.dense import DenseTable
    from psfleet.core.engine.tables.memory_choice import HOST, CudaMemory, MemoryChoice
    from psfleet.core.engine.tables.sparse import SparseTable

    on_device = CudaMemory.sparse

    def sparse(
        self: CudaMemory, spec: TableSpec, max_rows: int, host: MemoryBudget, own: MemoryBudget
    ) -> tuple[RowMemory, RowUpdate, MemoryBudget]:
        """As under `auto`, also for tables that a test makes itself."""
        kind = HOST.sparse if self.why_not(spec) else partial(on_device, self)
        return kind(spec, max_rows, host, own)

    CudaMemory.sparse = sparse  # type: ignore[method-assign]
    SparseTable.__init__.__defaults__ = (2**28, 1, None, "cuda", None)
    DenseTable.__init__.__defaults__ = ("cuda",)
    MemoryChoice.__init__.__defaults__ = ("cuda", True, {"cuda": room}, True, "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot apply."""
    for item in items:
        for place, why in _NOT_ON_A_DEVICE.items():
            if item.nodeid.startswith(f"tests/{place}"):
                item.add_marker(pytest.mark.skip(reason=f"not on a device: {why}"))


@pytest.fixture(scope="session", autouse=True)
def servers_have_a_device() -> None:
    """Servers are forks of a process that has compiled kernels."""
    if SIMULATED and subprocess.Popen is not starter.exec_popen:
        starter.start_simulator_zygote("tests.tables.compiled_server")
