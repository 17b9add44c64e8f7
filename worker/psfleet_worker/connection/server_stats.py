"""Statistics of a server, from its Status reply."""

from typing import Any

from psfleet.wire.mode_messages import read_mode


def figures_of(status: Any) -> dict[str, Any]:
    """Return a StatusReply as Runtime.stats gives it."""
    return {
        "server": status.server,
        "pid": status.pid,
        "mode": read_mode(status.mode) if status.mode else None,
        "staleness": dict(status.staleness),
        "leading_steps": status.leading_steps,
        "pushes": status.pushes,
        "repeats": status.repeats,
        "samples": sum(status.samples.values()),
        "losses": dict(status.losses),
        "round": status.round,
        "workers": status.workers,
        "torn": [
            {"worker": step.worker, "incarnation": step.incarnation, "last": dict(step.sequences)}
            for step in status.torn
        ],
        "bytes_in": status.bytes_in,
        "bytes_out": status.bytes_out,
        "cpu_seconds": status.cpu_seconds,
        "resident_bytes": status.resident_bytes,
        "tables": [
            {
                "name": table.name,
                "kind": table.kind,
                "count": table.count,
                "bytes": table.bytes,
                "device_bytes": table.device_bytes,
                "step": table.step,
            }
            for table in status.tables
        ],
    }
