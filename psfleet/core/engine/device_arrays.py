"""Arrays of another library, such as PyTorch, in the memory of the GPU that holds this process's tables.

A table in this process can read ids and gradients from such arrays and write rows to them, without a copy in
host memory. This module imports neither CUDA nor the other library: psfleet.torch.device_tensors makes the
arrays, and tables in psfleet/core/engine/tables/device use them.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class DeviceArray(ABC):
    """Contiguous array on the GPU. NumPy takes it for an array, and makes a copy in host memory.

    Attributes:
        shape, dtype: As of a NumPy array.
        address: Address of the first element on the GPU.
        stream: Handle of the CUDA stream in which the library has written the array and will use it next.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    address: int
    stream: int

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def to_host(self) -> NDArray[Any]:
        """Wait for the array, and return a copy in host memory."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return a copy for NumPy, which passes the arguments of `np.asarray`."""
        return self.to_host()


class DeviceSums(DeviceArray):
    """Gradients of distinct ids on the GPU, float32 [n, width], all of which are finite.

    Attributes:
        ids: The ids, int64 [n].
        square: Sum of the squares of all values.
    """

    ids: DeviceArray
    square: float
    are_surely_finite = True


class DeviceReader(Protocol):
    """Sparse table that can write rows to an array on the GPU."""

    def pull_to_device(self, ids: DeviceArray, out: DeviceArray) -> bool:
        """Write the weights of these ids to `out`, without waiting for the GPU.

        Returns False, and writes nothing, if some rows of the table are in host memory.

        Args:
            ids: int64 [n], repeats allowed.
            out: float32 [n, dim].
        """
