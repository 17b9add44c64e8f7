"""A fleet whose servers have standbys, and the launcher's decisions about them, made by a thread."""

import contextlib
import subprocess
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_launch.job.job_plan import Member
from psfleet_launch.supervision.standbys import PromoteStandby, Standbys
from tests.waiting import until

LOOK = 0.005  # seconds between looks at processes and ready files
LONGEST = 60.0  # seconds until a standby must be ready


class Pairs(LocalFleet):
    """Servers and their standbys.

    Args:
        settings: As LocalFleet's; in `crashes` each server has first its own, then those of its standbys, and
            "" for none.

    Attributes:
        takeovers, lost: How often a standby took over, or was replaced.
    """

    def __init__(
        self, servers: int = 2, workers: int = 2, transport: Any = "unix", **settings: Any
    ) -> None:
        super().__init__(servers, workers, transport, replicas=1, **settings)
        self.places = Standbys()
        self.takeovers = 0
        self.lost = 0
        self._members: dict[Member, subprocess.Popen[bytes]] = {}
        self._ended: set[Member] = set()
        self._looking = threading.Lock()

    def __enter__(self) -> "Pairs":
        super().__enter__()
        primaries = [Member("server", index) for index in range(self.servers)]
        self._members = dict(zip(primaries, self.processes, strict=True))
        self._start(self.places.begin(primaries))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.processes[:] = self._members.values()
        self.close()
        for process in self.processes:
            _close_commands(process)

    def process(self, index: int) -> "subprocess.Popen[bytes]":
        """That of the primary."""
        return self._members[self.places.primary[index]]

    def follower(self, index: int) -> "subprocess.Popen[bytes]":
        """That of the standby."""
        return self._members[self.places.standby[index]]

    def await_standbys(self) -> None:
        """Return when every server waits for its standby."""
        until(lambda: not self._look(), lambda: f"{self._awaited()} are not ready: {self.logs()}")

    def logs(self) -> str:
        """What all servers have printed."""
        return "\n".join(self.log(index) for index in range(self.servers))

    def promote(self, index: int) -> None:
        """Let the standby take over, whatever the primary does."""
        promote = self.places.take_over(self.places.primary[index])
        assert promote is not None
        self._promote(promote)

    def _promote(self, promote: PromoteStandby) -> None:
        self.ready_file(promote.member.rank, promote.member.copy).unlink()
        self._order(promote.member, f"promote {promote.term}")
        self.takeovers += 1

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Within, standbys take over from servers that die, and are replaced, as a launcher would."""
        over = threading.Event()

        def decide() -> None:
            while not over.wait(LOOK):
                self._look()
                for member, process in [*self._members.items()]:
                    if process.poll() is not None and member not in self._ended:
                        self._ended.add(member)
                        if process.returncode:
                            self._decide(member)

        thread = threading.Thread(target=decide, name="deciding")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def await_end(self, timeout: float = 120.0) -> None:
        """Return when all have ended by themselves but standbys that were not ready in time."""
        living = {*self.places.primary.values(), *self.places.ready}
        codes = {member: self._members[member].wait(timeout) for member in living}
        assert not any(codes.values()), f"{codes}: {self.logs()}"

    def _decide(self, member: Member) -> None:
        if self.places.follows(member):
            release, following = self.places.replace(member)
            self._order(release.member, f"release {release.attach}")
            self.lost += 1
            self._start(following)
        elif (promote := self.places.take_over(member)) is not None:
            self._promote(promote)
        elif self.durability == "log" and self.places.primary[member.rank] == member:
            _close_commands(self._members[member])
            self._members[member] = self.spawn(member.rank, member.copy, follows=False)
            self._ended.discard(member)

    def _awaited(self) -> set[Member]:
        """Members that are not ready yet: standbys that still receive rows, and promoted standbys."""
        places = self.places
        return set(places.standby.values()) - places.ready | places.promoted

    def _look(self) -> set[Member]:
        with self._looking:
            for member in self._awaited():
                if self.ready_file(member.rank, member.copy).exists():
                    self._start(self.places.is_ready(member))
            return self._awaited()

    def _start(self, members: Sequence[Member]) -> None:
        for member in members:
            self._members[member] = self.spawn(member.rank, member.copy)

    def _order(self, member: Member, order: str) -> None:
        stdin = self._members[member].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(f"{order}\n".encode())


def _close_commands(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    process.stdin.close()
