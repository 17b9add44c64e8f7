"""A plugin of pytest (-p tests.torch.on_table_gpu, with tests.tables.on_device): torch's tensors are where
the tables of the device are, so that tables read and write them.

With PSFLEET_TEST_GPU=1 that is a GPU, for which tests make their tensors. Else it is the processor: in its
memory are what the driver of tests/kernels/driver.c calls device memory, and the arrays of numba's simulator.
"""
# mypy: disable-error-code="no-untyped-call"

import ctypes
import os
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numba import cuda

from psfleet.core.engine.device_arrays import DeviceArray
from psfleet.core.engine.kernels.device.cuda_arithmetic import SIMULATED
from psfleet.torch import device_tensors


def pytest_configure(config: pytest.Config) -> None:
    """Make it so."""
    if os.environ.get("PSFLEET_TEST_GPU") != "1":
        use_processor()


def use_processor() -> None:
    """Take the processor's tensors for the device's. Its kernels must be installed before."""
    from psfleet.core.engine.tables.device import device_updates

    device_tensors.table_gpu = lambda: torch.device("cpu")
    # In the simulator, 0 is a stream that does its work at once (device_order.py), as torch does here.
    handle = 0 if SIMULATED else int(_stream().handle)
    device_tensors.stream_handle = lambda: handle
    if SIMULATED:
        device_updates._flat = _simulated


@cache
def _stream() -> Any:
    """A stream of the driver that lives as long as the process."""
    return cuda.stream()


def _simulated(array: DeviceArray, dtype: Any) -> Any:
    """The memory of a tensor as an array of the simulator."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    count = int(np.prod(array.shape))
    memory = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(array.address)
    return FakeCUDAArray(np.frombuffer(memory, dtype))
