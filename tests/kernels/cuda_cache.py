"""Run in a process of its own, with an empty PSFLEET_CACHE and the driver of driver.c: compiled CUDA kernels
are kept on disk.
"""
# mypy: disable-error-code="no-untyped-call"

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numba import cuda

from psfleet.core.engine.kernels import cache
from psfleet.core.engine.kernels.device.cuda import table_kernels
from psfleet.core.engine.kernels.device.cuda_launch import empty
from psfleet.core.engine.kernels.device.cuda_queue import DeviceOperations


def again() -> Any:
    """A kernel as the next process finds it."""
    table_kernels.cache_clear()
    cache._modules.clear()
    return table_kernels("cuda_rows").scale


def launched_from() -> tuple[int, int]:
    """How often a kernel that is launched came from the disk, and how often it was compiled."""
    kernel, operations = again(), DeviceOperations()
    arguments = empty(8, np.float32), 8, 2, 1, np.float32(2)
    operations.launch(kernel, 1, 1, operations.stream(), arguments)
    return sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values())


def main() -> int:
    """Launch a kernel that is new, known, damaged and known again."""
    pairs = [launched_from(), launched_from()]
    folder = cache.cache_folder() / "__pycache__"
    for index in folder.glob("*.nbi"):
        index.write_bytes(b"half a f")
    pairs += [launched_from(), launched_from()]
    print(pairs, sorted(path.name for path in folder.iterdir()))
    return pairs != [(0, 1), (1, 0), (0, 1), (1, 0)]


if __name__ == "__main__":
    assert Path(cuda.__file__).parts[-4] == "numba_cuda", "numba's own CUDA target is another one"
    sys.exit(main())
