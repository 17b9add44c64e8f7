"""A shard and a coordinator are kept in a log, and are what it says when they start again."""

from collections.abc import Callable, Iterator
from pathlib import Path

from psfleet.checkpoint import Snapshot, load_shard, own_name
from psfleet.errors import CheckpointError
from psfleet.faults.crash_points import CrashFaults
from psfleet.platform.notices import say
from psfleet.schema.table import BLOCK
from psfleet.settings.environment import Environment
from psfleet.shard.events import MakeCut, Record
from psfleet.shard.shard import Shard
from psfleet.wire.v1.log_pb2 import LogHeader
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.coordinator_messages import Decision
from psfleet_server.durability.log import ServerLog, records
from psfleet_server.durability.records import (
    RecordKind,
    cut_of,
    encode,
    encode_change,
    encode_state,
)
from psfleet_server.durability.recovery import begin, check_restart, go_on_from, take_all

__all__ = ["Journal", "open_log"]

MakeLog = Callable[..., ServerLog]
"""Takes what ServerLog takes."""


def open_log(
    environment: Environment, tell: Callable[[str], None] = say, make: MakeLog = ServerLog
) -> ServerLog | None:
    """The log that the environment asks for, by `make`; None: nothing is kept."""
    if not environment.keeps_log:
        return None
    header = LogHeader(
        job=environment.job,
        server=environment.rank,
        servers=len(environment.servers),
        workers=environment.workers,
        block=BLOCK,
    )
    path = Path(environment.log_folder) / f"server.{environment.rank}.log"
    return make(
        path,
        header,
        fsync=environment.durability == "log+fsync",
        crashes=CrashFaults.wanted(),
        tell=tell,
        waits=not environment.standby,
    )


class Journal:
    """Keeps a shard and a coordinator in a log.

    Args:
        log: Is written and read.
        shard, coordinator: Are kept.
        snapshots: Where the job's snapshots lie, with which files of the log begin.
    """

    def __init__(
        self,
        log: ServerLog,
        shard: Shard,
        coordinator: Coordinator | None,
        snapshots: Path | None = None,
    ) -> None:
        self.log = log
        self._follows = False
        self._snapshots = snapshots
        self._shard = shard
        self._coordinator = coordinator

    def start(self, load_path: str | None = None, resume: str = "") -> int:
        """Become what the log says, then keep on writing it.

        Args:
            load_path: A checkpoint to begin with, if the server was never ready before.
            resume: A snapshot to go on from, likewise.

        Returns:
            How many records there were.

        Raises:
            LogError: The log is damaged, or says what cannot have been.
        """
        fresh = set(self.log.files) == {0} and not any(
            kind == RecordKind.READY for kind, *_ in records(self.log.path)
        )
        count = self.log.forget() if fresh else self._replay()
        self._shard.journal = self._keep
        if self._coordinator is not None:
            self._coordinator.journal = self._keep_decision
        if fresh:
            if resume:
                state = go_on_from(resume, self._shard, self._coordinator)
                if state is not None:
                    self.log.append(*encode_state(RecordKind.CORE, state))
            elif load_path is not None:
                load_shard(load_path, self._shard)
            self.log.append(RecordKind.READY, [])
        self.log.settle(self.log.end)
        return count

    def follow(self, kind: int, body: memoryview) -> None:
        """Keep a record of the primary, whose standby this process is; the first one begins the log.

        Raises:
            LogError: It could not be written.
        """
        if not self._follows:
            self._follows = True
            self.log.forget()
        self.log.append(kind, [body])
        if kind == RecordKind.CUT:
            self.log.turn(cut_of(body))
        self.log.settle(self.log.end)

    def has_copy(self) -> None:
        """All that the primary has is in the log: a server may start from it."""
        self.log.append(RecordKind.READY, [])
        self.log.settle(self.log.end)

    def lead(self) -> None:
        """Keep what this process does itself from now on, for it is the primary."""
        self._shard.journal = self._keep
        if self._coordinator is not None:
            self._coordinator.journal = self._keep_decision

    def can_start_from(self, number: int) -> bool:
        """Whether a snapshot that is said to be complete is one to start from; says why it is not."""
        if self._snapshots is None:
            return False
        try:
            check_restart(Snapshot(self._snapshots / own_name(number), read_back=False))
        except (CheckpointError, OSError) as error:
            say(f"the log keeps its old files, which are needed without snapshot {number}: {error}")
            return False
        return True

    def shorten(self, number: int) -> None:
        """A server can start from this snapshot: what the log says before it is not needed any more."""
        self.log.shorten(number)

    def _replay(self) -> int:
        base = begin(self.log.first, self._snapshots, self._shard, self._coordinator)

        def records_reached() -> Iterator[tuple[int, memoryview]]:
            for record in self.log.recover(base):
                self.log.reach("replay")
                yield record

        return take_all(
            records_reached(), self.log.first, self._snapshots, self._shard, self._coordinator
        )

    def _keep(self, record: Record) -> None:
        self.log.append(*encode(record))
        if isinstance(record, MakeCut):
            self.log.turn(record.number)

    def _keep_decision(self, decision: Decision) -> None:
        self.log.append(*encode_change(decision))
