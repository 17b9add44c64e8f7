"""Refuses work in a fork of the process that it belongs to, such as a DataLoader's worker.

A fork has a copy of the parent's tables and connections, but none of its threads. Whatever it writes is lost.
"""

import os

from psfleet.core.base.errors import UsageError


def check_process(process: int, what: str = "") -> None:
    """Refuse to work in a fork.

    Args:
        process: Id of the process that owns the tables or connections.
        what: Values that the owner would never see, or empty if the owner's connections are to be used.

    Raises:
        UsageError: This process is another one.
    """
    if os.getpid() != process:
        reason = f"would never see {what}" if what else "has the connections to the servers"
        raise UsageError(
            f"process {os.getpid()} was forked from process {process}, which {reason}; do that in process "
            f"{process}, and let forks such as those of a DataLoader only prepare data"
        )
