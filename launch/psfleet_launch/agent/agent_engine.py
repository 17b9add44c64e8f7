"""The engine of an agent: that of this machine, which also counts what processes use."""

import os
import selectors
import signal
import subprocess
from collections.abc import Mapping, Sequence
from resource import struct_rusage

from psfleet.wire.v1 import agent_pb2 as pb
from psfleet_launch.agent.machine import memory_kills
from psfleet_launch.engines.local import LocalEngine
from psfleet_launch.engines.remote.agent_messages import member_message
from psfleet_launch.job.job_plan import Job, Member
from psfleet_launch.supervision.job_events import ProcessExited

__all__ = ["AgentEngine"]

_OUT_OF_MEMORY = "killed by SIGKILL, because memory ran out (the kernel's out-of-memory killer)"


class AgentEngine(LocalEngine):
    """Processes of this machine, which die with the agent.

    Args:
        workers: Of the job on this machine; they share its cores.
    """

    def __init__(self, job: Job, selector: selectors.BaseSelector, workers: int) -> None:
        super().__init__(job, selector)
        # LocalEngine divides the cores by the job's workers, of which only these are here.
        self._cores = len(os.sched_getaffinity(0)) * len(job.workers) // max(workers, 1)
        self._memory_kills = memory_kills()
        self._used: dict[int, struct_rusage] = {}

    def placement(self) -> Mapping[str, Sequence[Member]]:
        """None: the launcher places members."""
        return {}

    def endpoints(self) -> list[str]:
        """None: the launcher chooses them."""
        return []

    def exit_message(self, exited: ProcessExited) -> pb.Exited:
        """What the launcher is told of a process that has ended."""
        used = self._used.pop(self._processes[exited.member].pid)
        return pb.Exited(
            member=member_message(exited.member),
            code=exited.code,
            left=exited.left,
            cause=self._cause(exited.code),
            cpu_seconds=used.ru_utime + used.ru_stime,
            peak_memory=used.ru_maxrss * 1024,
        )

    def _cause(self, code: int) -> str:
        """Why a process has ended, where that is known here; empty: it is not."""
        before, self._memory_kills = self._memory_kills, memory_kills()
        if code == -signal.SIGKILL and self._memory_kills > before:
            return _OUT_OF_MEMORY
        if code > 0 and not os.statvfs(self.job.folder).f_bavail:
            return f"no room is left in {str(self.job.folder)!r}, where its output goes; make some"
        return ""

    def _poll(self, process: "subprocess.Popen[bytes]") -> int | None:
        if process.returncode is None:
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                self._used[pid] = used
        return process.returncode
