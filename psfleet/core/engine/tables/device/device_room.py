"""Bytes of the GPU's memory that are free, and the refusal of a table that is larger."""

from psfleet.core.base.errors import UsageError


def device_memory() -> tuple[float, float]:
    """Return the free bytes and all bytes of the GPU's memory. A simulator has infinitely many."""
    from numba import cuda

    free, total = cuda.current_context().get_memory_info()  # type: ignore[no-untyped-call]
    return free, total


def check_device_memory(table: str, size: int) -> None:
    """Refuse a table that is larger than what the GPU has left.

    Raises:
        UsageError: It is.
    """
    free, total = device_memory()
    if size > free:
        raise UsageError(
            f"table {table!r} needs {size >> 20:,} MiB of the GPU's memory, of which "
            f"{int(free) >> 20:,} of {int(total) >> 20:,} MiB are free; use device='cpu' or more servers"
        )
