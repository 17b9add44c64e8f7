"""Looks at what the servers of a job use, and asks for more or fewer by the rule of `--servers 2..8`."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from psfleet.formats import write_scale
from psfleet_launch.job.job_plan import Job
from psfleet_launch.job.status_poller import StatusPoller
from psfleet_launch.supervision.scaling_rule import EVERY, ServerUsage, wanted

if TYPE_CHECKING:
    from psfleet.wire.v1.shard_pb2 import StatusReply

_KEPT = 60  # figures that matter
_PAUSE = 60.0  # seconds after a request, in which what it changes can be seen


class ServerUsageWatch:
    """Asks as `psfleet scale` does."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._poller: StatusPoller[ServerUsage] | None = None
        self._asked = -_PAUSE

    def follow(self, endpoints: Sequence[str]) -> None:
        """Look at these servers from now on, if their number may change."""
        count = self._job.request.server_count
        self.stop()
        if count.most > count:
            self._poller = StatusPoller(endpoints, _usage, EVERY, self._job.reader)
            self._poller.start()

    def stop(self) -> None:
        """Look no more."""
        if self._poller is not None:
            self._poller.stop()
            self._poller = None

    def ask(self) -> str:
        """Ask for another number of servers if one is wanted; a line that says why, or nothing.

        Raises:
            OSError: The request cannot be written.
        """
        request = self._job.request
        if self._poller is None or time.monotonic() < self._asked + _PAUSE:
            return ""
        usages = self._poller.history[-_KEPT:]
        if request.disk:  # rows take what memory there is
            usages = [replace(usage, memory=0.0) for usage in usages]
        number = wanted(usages, request.server_count, request.server_cores or 1)
        if number is None:
            return ""
        self._asked = time.monotonic()
        write_scale(self._job.logs, number.servers)
        return f"servers   {number.servers} are wanted: {number.why}"


def _usage(replies: "Sequence[StatusReply]", at: float) -> ServerUsage:
    """What they use together."""
    memory = max((reply.memory_used for reply in replies), default=0.0)
    return ServerUsage(at, len(replies), memory, sum(reply.cpu_seconds for reply in replies))
