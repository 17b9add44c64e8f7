"""Tensors on the GPU that holds this process's tables: handed to the tables as they are, without a host copy.

Embeddings use it if their table is on the GPU and the script trains without a cluster. Torch's current
stream and that of the table wait for each other by events. The host waits for two numbers of each gradient:
the number of its distinct ids, and the square of its norm, which shows whether all values are finite.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from psfleet.core.engine.device_arrays import DeviceArray, DeviceSums
from psfleet.core.engine.gradients import DeviceGradient, SparseGrad

Ids = NDArray[np.int64]
_ID_TYPES = (torch.int64, torch.int32)  # the host path converts other types, or refuses them


def table_gpu() -> torch.device:
    """Return the GPU that holds this process's tables. Tests replace this function and `stream_handle`."""
    from numba import cuda

    return torch.device("cuda", cuda.get_current_device().id)  # type: ignore[no-untyped-call]


def stream_handle() -> int:
    """Return the handle of torch's current stream on that GPU."""
    return torch.cuda.current_stream(table_gpu()).cuda_stream


def is_shared(ids: Tensor) -> bool:
    """Return whether ids are a tensor that a table on the GPU can read."""
    return ids.device == table_gpu() and ids.dtype in _ID_TYPES and ids.numel() > 0


class TensorArray(DeviceArray):
    """Tensor as an array on the GPU. It keeps the tensor's memory alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor = tensor.detach().contiguous()
        self.shape = tuple(tensor.shape)
        self.dtype = np.dtype(np.int64 if tensor.dtype == torch.int64 else np.float32)
        self.address = tensor.data_ptr()
        self.stream = stream_handle()

    @override
    def to_host(self) -> NDArray[Any]:
        array: NDArray[Any] = self._tensor.cpu().numpy()
        return array


class TensorSums(TensorArray, DeviceSums):
    """Tensor as the sums of gradients. The arguments are the attributes of DeviceSums."""

    def __init__(self, tensor: Tensor, ids: DeviceArray, square: float) -> None:
        super().__init__(tensor)
        self.ids, self.square = ids, square


def _begin_sums(ids: Tensor, values: Tensor) -> Callable[[], DeviceSums | None]:
    """Begin to sum the values of each distinct id on the GPU. Returns a function that returns the sums.

    The function waits for the GPU. It returns None if a sum is not finite. Values are added in the order of
    the batch, beginning with 0, as psfleet.core.engine.kernels.dedup does. The ids of the sums ascend.

    Args:
        ids: int64 [n], n above 0.
        values: float32 [n, dim].
    """
    n, device = len(ids), ids.device
    # Sorting is stable, so that `order` names the rows of an id in the order of the batch:
    #
    #     ids      7  3  7  9        sorted   3  7  7  9        starts   0  1  3  4
    #                                order    1  0  2  3        (the last is the end: 3 distinct ids)
    #
    sorted_ids, order = torch.sort(ids, stable=True)
    is_first = F.pad(sorted_ids[1:] != sorted_ids[:-1], (1, 0), value=True)
    number = is_first.cumsum(0)  # of distinct ids so far
    # The number of distinct ids is not known on the host, so there are n sums, of which the last are empty.
    # What has no place of its own is written to the one behind the last, which is dropped.
    starts = torch.full((n + 1,), n, device=device)
    starts.scatter_(0, torch.where(is_first, number - 1, n), torch.arange(n, device=device))
    sums = F.embedding_bag(order, values, starts[:n], mode="sum")
    square = torch.linalg.vector_norm(sums, dtype=torch.float64).square()
    flags = torch.stack([number[-1].double(), square])

    def finish() -> DeviceSums | None:
        count, total = flags.tolist()  # two numbers, for which the host waits
        if not math.isfinite(total):
            return None
        distinct_ids = TensorArray(sorted_ids[starts[: int(count)]])
        return TensorSums(sums[: int(count)], distinct_ids, total)

    return finish


def device_gradient(ids: Tensor, values: Tensor) -> DeviceGradient:
    """Return the gradient of rows: ids int64 [n], repeats allowed, and values float32 [n, dim]."""

    def host() -> SparseGrad:
        return SparseGrad(ids.cpu().numpy(), values.cpu().numpy())

    # The sums of all tables of a step are begun before the first is waited for.
    return DeviceGradient(host, _begin_sums(ids, values) if len(ids) else lambda: None)
