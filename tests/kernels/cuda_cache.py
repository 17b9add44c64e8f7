"""Run in a process of its own, with an empty PSFLEET_CACHE: compiled CUDA kernels are kept on disk.

There is no device: numba is told that it has compute capability 9.0, and that a kernel has been launched.
"""
# mypy: disable-error-code="no-untyped-call,attr-defined,assignment"

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import cuda, float32
from numba.cuda import codegen, dispatcher
from numba.cuda.cudadrv import driver

from psfleet.core.engine.kernels import cache
from psfleet.core.engine.kernels.device.cuda import table_kernels
from psfleet.core.engine.kernels.device.cuda_queue import DeviceOperations

NEWEST = (9, 0)
launched: list[str] = []


def stand_in() -> None:
    """What numba asks of a device."""
    device = SimpleNamespace(compute_capability=NEWEST)
    kernel = dispatcher._Kernel
    dispatcher.get_current_device = lambda: device
    codegen.devices = SimpleNamespace(get_context=lambda: SimpleNamespace(device=device))
    kernel.bind = lambda self: self._codelibrary.get_cubin(cc=NEWEST)
    kernel.launch = lambda self, *_: launched.append(self.entry_name)
    driver._to_core_stream = lambda stream: stream


def again() -> Any:
    """A kernel as the next process finds it."""
    table_kernels.cache_clear()
    cache._modules.clear()
    return table_kernels("cuda_rows").scale


def launched_from() -> tuple[int, int]:
    """How often a kernel that is launched came from the disk, and how often it was compiled."""
    kernel = again()
    DeviceOperations().launch(kernel, 1, 1, 0, (Values(), 8, 2, 1, np.float32(2)))
    return sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values())


def main() -> int:
    """Launch a kernel that is new, known, damaged and known again."""
    stand_in()
    pairs = [launched_from(), launched_from()]
    folder = cache.cache_folder() / "__pycache__"
    for index in folder.glob("*.nbi"):
        index.write_bytes(b"half a f")
    pairs += [launched_from(), launched_from()]
    print(pairs, launched, sorted(path.name for path in folder.iterdir()))
    return pairs != [(0, 1), (1, 0), (0, 1), (1, 0)] or len(launched) != 4


class Values:
    """float32 [8] on the device, as far as a launch looks at it."""

    _numba_type_ = float32[::1]


if __name__ == "__main__":
    assert Path(cuda.__file__).parts[-4] == "numba_cuda", "numba's own CUDA target is another one"
    sys.exit(main())
