"""Refuses work in a fork of the process that owns the tables or connections, such as a DataLoader's worker.

A fork has a copy of the parent's tables and connections, but none of its threads, and its changes never
reach the parent.
"""

import os

from psfleet.core.base.errors import UsageError


def check_process(process: int, what: str = "") -> None:
    """Raise an error if this process is a fork of the owner.

    Args:
        process: Id of the process that owns the tables or connections.
        what: Values that the owner would never see, for the text; empty if the fork would use the owner's
            connections.

    Raises:
        UsageError: This process is not the owner.
    """
    if os.getpid() != process:
        reason = f"would never see {what}" if what else "has the connections to the servers"
        raise UsageError(
            f"process {os.getpid()} was forked from process {process}, which {reason}; do that in process "
            f"{process}, and let forks such as those of a DataLoader only prepare data"
        )
