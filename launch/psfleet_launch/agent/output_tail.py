"""Reads what processes write from their files as it comes, to be sent on."""

from collections.abc import Iterator
from pathlib import Path

from psfleet.wire.v1 import agent_pb2 as pb
from psfleet_launch.engines.remote.agent_messages import member_message
from psfleet_launch.job.job_plan import Job, Member

__all__ = ["OutputTails"]

_CHUNK = 1 << 16  # bytes


class OutputTails:
    """How far each member's file has been read. The shown member's output comes by pipes."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._read: dict[Member, int] = {}

    def follow(self, member: Member) -> None:
        """Read this member's file from now on."""
        if member != self._job.shown:
            self._read.setdefault(member, 0)

    def fresh(self) -> Iterator[pb.AgentMessage]:
        """One chunk of each file that has grown."""
        for member in self._read:
            if data := self._next(member):
                yield _message(member, data)

    def rest(self, member: Member) -> Iterator[pb.AgentMessage]:
        """All that a file holds."""
        while member in self._read and (data := self._next(member)):
            yield _message(member, data)

    def _next(self, member: Member) -> bytes:
        path: Path = self._job.log(member)
        if path.stat().st_size <= self._read[member]:
            return b""
        with path.open("rb") as file:
            file.seek(self._read[member])
            data = file.read(_CHUNK)
        self._read[member] += len(data)
        return data


def _message(member: Member, data: bytes) -> pb.AgentMessage:
    chunk = pb.OutputChunk(member=member_message(member), data=data)
    return pb.AgentMessage(output=chunk)
