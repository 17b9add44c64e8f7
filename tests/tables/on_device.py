"""A plugin of pytest (-p tests.tables.on_device): tables that name no device are on the simulated one.

Those of a shard share little of its memory, so that many rows are in host memory.
"""

import os

import numba.cuda  # noqa: F401  # it starts a program when it is first imported, which no quick test may

from psfleet.tables.dense import DenseTable
from psfleet.tables.devices import DeviceChoice
from psfleet.tables.sparse import SparseTable

_LITTLE = 48 << 10  # bytes, for a few hundred rows

assert os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
SparseTable.__init__.__defaults__ = (2**28, 1, None, "cuda", None)
DenseTable.__init__.__defaults__ = ("cuda",)
DeviceChoice.__init__.__defaults__ = ("cuda", True, _LITTLE, False)
