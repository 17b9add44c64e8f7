"""Statistics of a server, from its Status reply."""

from typing import Any

from psfleet.wire.membership_messages import read_mode

_FIGURES = (
    *("server", "pid", "leading_steps", "pushes", "repeats", "round", "workers"),
    *("bytes_in", "bytes_out", "cpu_seconds", "resident_bytes"),
)
_TABLE_FIGURES = ("name", "kind", "count", "bytes", "device_bytes", "step")


def figures_of(status: Any) -> dict[str, Any]:
    """Return a StatusReply as Runtime.stats gives it."""
    return {name: getattr(status, name) for name in _FIGURES} | {
        "mode": read_mode(status.mode) if status.mode else None,
        "staleness": dict(status.staleness),
        "samples": sum(status.samples.values()),
        "losses": dict(status.losses),
        "torn": [
            {"worker": step.worker, "incarnation": step.incarnation, "last": dict(step.sequences)}
            for step in status.torn
        ],
        "tables": [
            {name: getattr(table, name) for name in _TABLE_FIGURES} for table in status.tables
        ],
    }
