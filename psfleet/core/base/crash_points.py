"""Points in the code where tests and `psfleet-launch --chaos` can make a process fail.

Code that must survive a crash at a certain line calls `reach` there. The call does nothing unless the
variable PSFLEET_CRASH names that point. Everything else about faults (the schedule, lost replies, full
disks, the audit and the report) is in `psfleet_launch.chaos`, which is loaded only in a job under `--chaos`.
"""

import functools
import importlib
import os
import signal
from collections.abc import Callable
from typing import Any

from psfleet.core.base.settings.declaration import from_variable
from psfleet.core.base.settings.declared_settings import FaultSettings
from psfleet.core.base.settings.kinds import CrashPoint

Send = Callable[[str, bytes, float], bytes]
"""Function for one attempt at a call.

Takes method, request and timeout in seconds; raises the call's error.
"""

# The points, in the order in which a process reaches them.
#
# Record of a log: append (before it is written), tear (written but for its last byte), appended (whole),
#   applied (it has taken effect), settled (before the reply), replay (before recovery applies it again).
# Snapshot, on each server: cut, page, written (its file is complete), turned (the log continues in a new
#   file), shortened (an old file of the log is removed). On the server that leads it: began (its folder is
#   made), unnamed and named (before and after it gets its name), away (between the two renames that replace
#   an older snapshot), complete (before workers and servers are told).
# Change of the members, on server 0: freeze, install (before a server is told).
# Move of rows: opened, sent, filled, prepared, adopted (a server, before it reports that); promised, decided
#   (server 0, before and after the decision).
# Standby: feed, fed (the primary, before and after it sends a record), waiting, followed (before and after
#   the standby's acknowledgement), receive, took (the standby, before and after it applies a record).
# "thread NAME": a ServiceThread begins.


_times = 0  # number of times that this process has reached the point of PSFLEET_CRASH


class SimulatedFault(Exception):
    """Error that `reach` raises if PSFLEET_CRASH is `POINT:N:raise`."""


def reach(point: str, last_act: Callable[[], object] | None = None) -> None:
    """Fail here if PSFLEET_CRASH names this point and the process has reached it for the N-th time.

    Args:
        last_act: Called right before the process fails, for example to write half a record.

    Raises:
        SimulatedFault: PSFLEET_CRASH requests an error. Otherwise the process is killed or stopped.
    """
    global _times
    crash = _crash()
    if crash is None or point != crash.point:
        return
    _times += 1
    if _times != crash.time:
        return
    if last_act is not None:
        last_act()
    if crash.fault == "raise":
        raise SimulatedFault(f"PSFLEET_CRASH is {crash}")
    os.kill(os.getpid(), signal.SIGSTOP if crash.fault == "stop" else signal.SIGKILL)


@functools.cache
def _crash() -> CrashPoint | None:
    """Return the parsed PSFLEET_CRASH, or None. Cached, because a push passes seven points."""
    crash: CrashPoint | None = from_variable(FaultSettings, "crash", os.environ)
    return crash


def chaos() -> Any:
    """Return the module `psfleet_launch.chaos.injection` if the job runs under `--chaos`, else None."""
    if not from_variable(FaultSettings, "chaos", os.environ):
        return None
    return importlib.import_module("psfleet_launch.chaos.injection")
