"""The files of what the members of a job write."""

from typing import IO

from psfleet_launch.job.job_plan import Job, Member
from psfleet_launch.job.spawn import open_log

__all__ = ["MemberLogs"]


class MemberLogs:
    """One file per member, opened when it is first used."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._files: dict[Member, IO[bytes]] = {}
        self._loses_output = False

    def open_all(self) -> None:
        """Open those of all seats.

        Raises:
            ConfigError: One cannot be written.
        """
        for member in (*self._job.servers, *self._job.workers):
            self.file(member)

    def file(self, member: Member) -> IO[bytes]:
        """The member's log, open for writing."""
        if member not in self._files:
            self._files[member] = open_log(self._job.log(member))
        return self._files[member]

    def write(self, member: Member, data: bytes) -> str:
        """Write what a member has said; if its log takes no more, as on a full disk, the job goes on.

        Returns:
            What to say of that, the first time; else nothing.
        """
        log, left = self.file(member), memoryview(data)
        try:
            # A log that becomes full takes the first bytes and refuses those after them.
            while left:
                left = left[log.write(left) :]
        except OSError as error:
            if not self._loses_output:
                self._loses_output = True
                return f"log {log.name!r} cannot be written ({error.strerror}); the job goes on"
        return ""

    def close(self) -> None:
        """Close all files."""
        for log in self._files.values():
            log.close()
