"""Free memory of the GPU, and the check that a new table fits into it."""

from psfleet.core.base.errors import UsageError


def device_memory() -> tuple[float, float]:
    """Return the free and the total bytes of the GPU's memory. Both are infinite in the simulator."""
    from numba import cuda

    free, total = cuda.current_context().get_memory_info()  # type: ignore[no-untyped-call]
    return free, total


def check_device_memory(table: str, size: int) -> None:
    """Raise an error if a table is larger than the free memory of the GPU.

    Args:
        table: Name of the table, for the message.
        size: Bytes that the table needs.

    Raises:
        UsageError: The GPU has less free memory than that.
    """
    free, total = device_memory()
    if size > free:
        raise UsageError(
            f"table {table!r} needs {size >> 20:,} MiB of the GPU's memory, of which "
            f"{int(free) >> 20:,} of {int(total) >> 20:,} MiB are free; use device='cpu' or more servers"
        )
