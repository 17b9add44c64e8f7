"""Which memory a table gets: the one that its definition names, or what the server's setting says."""

import functools
import math
from dataclasses import dataclass
from importlib.util import find_spec

from psfleet.errors import ConfigError, UsageError
from psfleet.rules.functions import is_same_on_devices
from psfleet.schema.table import Device, TableSpec

__all__ = ["DeviceChoice", "check_device_memory", "tables_share", "why_no_gpu"]


@functools.cache
def why_no_gpu() -> str:
    """Why this process cannot use a GPU, as the end of a sentence; empty: it can."""
    missing = "numba's CUDA target is not installed; pip install 'psfleet[cuda]'"
    try:
        from numba import config, cuda
    except ImportError:
        return missing
    try:
        cuda.current_context()  # type: ignore[no-untyped-call]
    except Exception as error:  # no driver, or what numba and cuda.core say of a GPU that refuses
        why = " ".join(str(error).split()).removeprefix("Error at driver init: ")
        return f"there is no usable NVIDIA GPU or driver here ({why.split('. ')[0].rstrip('.')})"
    simulated = config.ENABLE_CUDASIM  # type: ignore[attr-defined]
    return "" if simulated or find_spec("numba_cuda") else missing  # numba's own one is old


@dataclass
class DeviceChoice:
    """What a process that holds tables chooses for each.

    Attributes:
        default: For tables that name no device.
        has_gpu: Whether this process may use one: only servers and whoever trains embedded.
        memory: Bytes of the GPU's memory that tables may take; 0: what is free, but for an eighth.
        is_auto: Tables that name no device are in host memory where the GPU has no room for them.
    """

    default: Device = "cpu"
    has_gpu: bool = False
    memory: int = 0
    is_auto: bool = False

    @classmethod
    def of_setting(cls, setting: str, memory: int = 0) -> "DeviceChoice":
        """What the setting `device` says: cpu, cuda or auto. `memory`: see the attribute.

        Raises:
            ConfigError: It says cuda and there is no GPU.
        """
        why = "" if setting == "cpu" else why_no_gpu()
        if setting == "cuda" and why:
            raise ConfigError(
                f"PSFLEET_DEVICE is 'cuda', but {why}. Say auto or cpu to hold tables in host memory"
            )
        return cls(
            "cpu" if setting == "cpu" or why else "cuda", True, memory, is_auto=setting == "auto"
        )

    def memory_limit(self) -> int | None:
        """Bytes of the GPU's memory that tables may take in all, before there is any; None: no limit."""
        limit = tables_share(_free_memory(), self.memory)
        return int(limit) if math.isfinite(limit) else None

    def of(self, spec: TableSpec, may_refuse: bool = True) -> Device:
        """Where the table is to be.

        Args:
            may_refuse: It is made now. Else it was made before, perhaps by a process with a GPU.

        Raises:
            ConfigError: Its definition names a device that this process lacks.
        """
        if spec.device is None:
            return self.default if _is_exact(spec) else "cpu"
        if spec.device == "cpu" or not (why := self._why_not(spec)):
            return spec.device
        if may_refuse:
            raise ConfigError(why)
        return "cpu"

    def may_be_moved(self, spec: TableSpec, may_refuse: bool = True) -> bool:
        """Whether a table for which the GPU has no room is in host memory instead. Arguments as for `of`."""
        return not may_refuse or (spec.device is None and self.is_auto)

    def _why_not(self, spec: TableSpec) -> str:
        if not _is_exact(spec):
            why = (
                f"its eviction policy {spec.policy.name!r} takes powers or remainders, whose "
                "last bits differ on a GPU"
            )
        else:
            why = why_no_gpu() if self.has_gpu else "this process keeps tables in host memory"
        return (
            f"table {spec.name!r} asks for device='cuda', but {why}; use device='cpu'"
            if why
            else ""
        )


def _is_exact(spec: TableSpec) -> bool:
    """Whether a GPU would let the same rows go as the CPU."""
    score = spec.policy.score()
    return score is None or is_same_on_devices(score)


def tables_share(free: float, memory: int) -> float:
    """Bytes that tables may take of so many that are free.

    An eighth is left for the gradients, ids and sums of the calls under way.

    Args:
        free: Bytes.
        memory: See DeviceChoice.
    """
    return min(free * 7 / 8, memory or math.inf)


def _free_memory() -> float:
    """Bytes of the GPU's memory that are free; under a simulator infinitely many."""
    from numba import cuda

    free, _ = cuda.current_context().get_memory_info()  # type: ignore[no-untyped-call]
    return float(free)


def check_device_memory(table: str, wanted: int) -> None:
    """Refuse a table that is larger than what the GPU has left.

    Raises:
        UsageError: It is.
    """
    from numba import cuda

    free, total = cuda.current_context().get_memory_info()  # type: ignore[no-untyped-call]
    if wanted > free:
        raise UsageError(
            f"table {table!r} needs {wanted >> 20:,} MiB of the GPU's memory, of which "
            f"{free >> 20:,} of {total >> 20:,} MiB are free; use device='cpu' or more servers"
        )
