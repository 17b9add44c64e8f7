"""The log of a server in a run with moves: the product's, in files, two of them while rows move."""

from collections.abc import Iterable
from pathlib import Path

from psfleet.core.base.settings.environment import Environment
from psfleet.core.engine.shard.shard import Shard
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.durability import log_place
from psfleet_server.durability.journal import Journal
from psfleet_server.durability.log import ServerLog, chained
from psfleet_server.durability.log_place import log_path, remove_earlier
from psfleet_server.durability.records import RecordKind, decode
from psfleet_server.durability.recovery import open_log, restored
from tests.protocol.fleet.follower import content_of
from tests.protocol.fleet.job import Job
from tests.protocol.scheduler import Broken, Disk

_OF_TRAINING = (RecordKind.PUSH, RecordKind.CLOSE, RecordKind.VIEW, RecordKind.JOIN)


class Start:
    """How a process of a server starts: what the launcher knows, and what the job's folder says.

    Attributes:
        environment: Of the process, after the decision has been read.
        generation: Of the log that it goes on from.
    """

    def __init__(self, rank: int, endpoints: Iterable[str], folder: Path, job: Job):
        self.environment = Environment(
            "server",
            rank,
            tuple(endpoints),
            job.workers,
            durability="log" if job.logs else "none",
            log_folder=str(folder),
        )
        self.generation = 0
        if job.logs or job.standbys:
            self.environment, self.generation = log_place.decided(self.environment)
        self.servers = len(self.environment.servers)
        self.folder = folder


class Kept:
    """One process's log, from which it has become what it is.

    `history`: What the logs of its place have been told in all, in order.
    """

    def __init__(
        self, start: Start, shard: Shard, coordinator: Coordinator | None, disk: Disk
    ) -> None:
        self._environment, self._generation = start.environment, start.generation
        self._disk = disk
        remove_earlier(start.environment)
        log = open_log(start.environment, generation=start.generation)
        assert log is not None
        self.journal = Journal(log, shard, coordinator, begins=not start.generation)
        try:
            self.journal.start()
        except BaseException:  # the process ends
            log.close()
            raise
        self.history: list[object] = [
            *disk.files.get(("history", start.generation), ()),
            *(decode(kind, body) for kind, body, *_ in chained(log.first) if kind in _OF_TRAINING),
        ]

    def open(self, generation: int, servers: int) -> ServerLog | None:
        return open_log(self._environment, generation=generation, servers=servers)

    def promise(self, generation: int, history: Iterable[object]) -> None:
        """The log of this generation begins with all that there has been so far."""
        self._disk.files["history", generation] = [*history]


def check_log(start: Start, shard: Shard) -> None:
    """Raise Broken unless the log gives the tables that a server holds."""
    again = Shard(shard.index, shard.servers)
    coordinator = None if shard.index else Coordinator(start.environment.workers, shard.servers)
    first = log_path(start.environment, start.generation)
    restored(first, str(start.folder / "snapshots"), again, coordinator)
    if content_of(again) != content_of(shard):
        raise Broken(f"the log of server {shard.index} does not give what it holds")
