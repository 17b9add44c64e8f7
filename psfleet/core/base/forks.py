"""Detects that code runs in a fork, such as a DataLoader's worker, of the process that owns the tables.

A fork has a copy of the parent's tables and connections, but none of the parent's threads. The parent would
never see changes that a fork makes, so such work is refused.
"""

import os

from psfleet.core.base.errors import UsageError


def check_process(process: int, what: str = "") -> None:
    """Check that this process is the owner of the tables or connections, and not a fork of the owner.

    Args:
        process: Id of the process that owns the tables or connections.
        what: Values that the owner would never see, for the error. Empty if a fork would use the owner's
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
