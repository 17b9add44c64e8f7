"""Recovery of a server's state, and the log in which a shard and a coordinator are kept.

Records of the shard and decisions of the coordinator come in the order in which they took effect, and
are taken once more through the code that took them first.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from psfleet.checkpoint import Snapshot, load_shard
from psfleet.core.base.errors import CheckpointError, LogError, UsageError
from psfleet.core.base.faults import CrashFaults
from psfleet.core.base.json_documents import reading
from psfleet.core.base.logs import log_of
from psfleet.core.base.object_store import is_whole, own_place
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import shown_url, url_of
from psfleet.core.engine.schema.table import BLOCK
from psfleet.core.engine.shard.event_shortcuts import replay
from psfleet.core.engine.shard.events import MakeCut, Record
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.shard_state import ShardState
from psfleet.core.net.body import read_alone
from psfleet.core.net.frame import Part
from psfleet.core.net.server_state import ServerState, read_state
from psfleet.core.net.v1.log_pb2 import DecisionRecord, LogHeader
from psfleet_server.coordinator.barriers import CollectiveState, ModeSwitch
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.coordinator_messages import Decision
from psfleet_server.coordinator.data_dispatch import DataDispatch
from psfleet_server.durability.log import ServerLog, chained, files_of, records
from psfleet_server.durability.log_place import log_path
from psfleet_server.durability.records import (
    RecordKind,
    become,
    cut_of,
    decode,
    encode,
    encode_change,
    encode_state,
    read_decision,
    server_state,
)

_log = log_of(__name__)


def restored(first: Path, snapshots: str, shard: Shard, coordinator: Coordinator | None) -> int:
    """Become what a log says, without writing to it; how many records were taken.

    Args:
        first: The log's first file, even if that is gone.
        snapshots: Folder or URL of the snapshots with which later files begin.

    Raises:
        LogError: The log is damaged, or says what cannot have been.
    """
    base = begin(first, snapshots, shard, coordinator)
    records = ((kind, body) for kind, body, *_ in chained(first, base) if kind)
    return take_all(records, first, snapshots, shard, coordinator)


def begin(first: Path, snapshots: str, shard: Shard, coordinator: Coordinator | None) -> int:
    """Become what the last complete snapshot holds; its number, 0: there is none.

    Raises:
        LogError: The log begins with a snapshot that is not there.
    """
    files, why = files_of(first), ""
    for number in sorted(files, reverse=True):
        if number == 0:
            return 0
        if not snapshots:
            continue
        try:
            snapshot = Snapshot(own_place(snapshots, number))
        except (CheckpointError, OSError) as error:
            why = why or f": {error}"
            continue
        for event in snapshot.events(shard.index, shard.servers, own=True):
            replay(shard, event)
        _become(snapshot.server(shard.index), shard, coordinator)
        return number
    raise LogError(
        f"log {str(first)!r} goes on from snapshot {min(files, default=0)}, which cannot be had{why}; "
        "restore it, or start the job anew from a checkpoint"
    )


def take_all(
    records: Iterable[tuple[int, memoryview]],
    first: Path,
    snapshots: str,
    shard: Shard,
    coordinator: Coordinator | None,
) -> int:
    """Let the records of a log take effect; how many there were.

    Raises:
        LogError: One cannot be taken, or the log's last file is missing.
    """
    count = cut = 0
    for kind, body in records:
        count += 1
        try:
            take(kind, body, shard, coordinator)
        except Exception as error:  # there is no end to what a record can hold
            raise LogError(
                f"record {count} of log {str(first)!r} cannot be taken: "
                f"{error}; read it with the psfleet version that wrote it, or start the job anew from a "
                "checkpoint"
            ) from None
        if kind == RecordKind.CUT:
            cut = shard.cuts.last
    if snapshots and cut > max(files_of(first)) and is_whole(own_place(snapshots, cut)):
        raise LogError(
            f"log {str(first)!r} goes on in a file that begins with snapshot {cut} and is missing; "
            "restore it, or start the job anew from a checkpoint"
        )
    return count


def check_restart(snapshot: Snapshot) -> None:
    """Take everything from a snapshot that a server takes when it starts from it, but its tables.

    Raises:
        CheckpointError: Something of it cannot be taken.
    """
    with reading(snapshot.path):
        for index in range(len(snapshot.manifest.files)):
            list(snapshot.specs(index))
            _become(snapshot.server(index), Shard(), None if index else Coordinator(1))


def go_on_from(path: str, shard: Shard, coordinator: Coordinator | None) -> ServerState | None:
    """Be one of a fleet that goes on from a snapshot, with any number of servers.

    Returns:
        What it is beside the tables; None: the snapshot is of another number of workers, whose rounds and
        incarnations mean nothing here; its tables count, and what is left of its datasets.

    Raises:
        CheckpointError: The snapshot is missing, incomplete or damaged; nothing was changed.
    """
    snapshot = Snapshot(path)
    state = snapshot.server(0)
    snapshot.load(shard)
    if _count(state) != shard.workers.count:
        if coordinator is not None:
            coordinator.go_on_with(_left(state))
        return None
    _resume(state, shard, coordinator)
    return state


def workers_of(path: str) -> int:
    """Return the number of workers in the fleet of a snapshot."""
    return _count(Snapshot(path).server(0))


def _count(state: ServerState) -> int:
    return len(state.shard.consistency.rounds.seats)


def _left(state: ServerState) -> DataDispatch:
    """Return the part of its datasets that a job has not used."""
    shard, coordinator = Shard(), Coordinator(1)
    _become(state, shard, coordinator)
    positions = {
        incarnation: shard.workers.positions[worker]
        for worker, incarnation in shard.workers.incarnations.items()
        if worker in shard.workers.positions
    }
    return coordinator.dispatch.left(shard.rounds.closed, positions)


def _resume(state: ServerState, shard: Shard, coordinator: Coordinator | None) -> None:
    """Restore the state of an earlier job. All workers begin again, from their first collective on."""
    _become(state, shard, coordinator)
    shard.rounds.go_back()
    shard.workers.progress.clear()  # what workers keep in the snapshot says where their scripts go on
    if coordinator is not None:
        for seat in coordinator.members.seats.values():
            seat.progress, seat.rests = "", 0
        consistency = shard.consistency
        switch = None
        if consistency.mode is not None and consistency.switches:
            switch = ModeSwitch(consistency.switches, consistency.declared, {}, {})
        coordinator.collectives = CollectiveState(switch=switch)
        coordinator.dispatch.inherit()


def _become(state: ServerState, shard: Shard, coordinator: Coordinator | None) -> None:
    if coordinator is not None:
        if state.coordinator is None:
            raise CheckpointError("the snapshot holds no decisions of a coordinator")
        become(coordinator, state.coordinator)
    shard.become(state.shard)


def copied(state: ShardState, coordinator: Coordinator | None) -> tuple[int, list[Part]]:
    """The record that ends the copy of a shard: what the server is beside its tables."""
    return encode_state(RecordKind.COPIED, server_state(state, coordinator))


def _be_copy(state: ServerState, shard: Shard, coordinator: Coordinator | None) -> None:
    _become(state, shard, coordinator)
    shard.rounds.committed.clear()  # no record says these; workers commit again
    shard.workers.view = shard.workers.promised = state.shard.workers.view


def take(kind: int, body: memoryview, shard: Shard, coordinator: Coordinator | None) -> None:
    """Let a record take effect: of the log, or of the primary that a standby follows."""
    try:
        _take(kind, body, shard, coordinator)
    except UsageError:
        if kind not in (RecordKind.PUSH, RecordKind.CLOSE):
            raise
        # A table was full; the worker has got the error.


def _take(kind: int, body: memoryview, shard: Shard, coordinator: Coordinator | None) -> None:
    if kind == RecordKind.CORE:
        _resume(read_state(body), shard, coordinator)
    elif kind == RecordKind.COPIED:
        _be_copy(read_state(body), shard, coordinator)
    elif kind == RecordKind.DECISION:
        if coordinator is None:
            raise LogError("it is of a coordinator, which this server is not")
        coordinator.replay(read_decision(read_alone(DecisionRecord, body)))
    elif kind == RecordKind.READY:
        if body:
            raise LogError("its body is not empty")
    else:
        replay(shard, decode(kind, body, lambda key: shard.tables[key].spec))


def open_log(
    environment: Environment,
    tell: Callable[[str], None] = _log.warning,
    generation: int = 0,
    servers: int = 0,
) -> ServerLog | None:
    """Open the log that the environment asks for; None: nothing is kept.

    Args:
        environment: Of the server.
        tell: Shows a line on the console.
        generation: Of the log.
        servers: Number of servers in that generation; 0: as in the environment.
    """
    if not environment.keeps_log:
        return None
    header = LogHeader(
        job=environment.job,
        server=environment.rank,
        servers=servers or len(environment.servers),
        workers=environment.workers,
        block=BLOCK,
    )
    return ServerLog(
        log_path(environment, generation),
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
        snapshots: Folder or URL of the job's snapshots, with which files of the log begin; empty: none.
        begins: The log may be new: the server has not been ready before.
    """

    def __init__(
        self,
        log: ServerLog,
        shard: Shard,
        coordinator: Coordinator | None,
        snapshots: str = "",
        begins: bool = True,
    ) -> None:
        self.log = log
        self._follows = False
        self._begins = begins
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
        if fresh and not self._begins:
            raise LogError(
                f"log {str(self.log.first)!r} does not hold what this server got when the number of servers "
                "changed; restore it, or start the job anew from a checkpoint"
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

    def set_primary(self) -> None:
        """Keep what this process does itself from now on, for it is the primary."""
        self._shard.journal = self._keep
        if self._coordinator is not None:
            self._coordinator.journal = self._keep_decision

    def go_on_in(self, log: ServerLog) -> None:
        """Go on in another log, which holds all that this process is; the one so far goes."""
        before, self.log = self.log, log
        log.tracing = before.tracing
        before.settle(before.end)  # whoever still waits for that is answered
        before.remove()

    def can_start_from(self, number: int) -> bool:
        """Return whether a server can start from a snapshot reported as complete; logs why it cannot.

        It does not read all of a store's: the manifest, which is written last, is there or not.
        """
        if not self._snapshots:
            return False
        place = own_place(self._snapshots, number)
        try:
            if url_of(place) is None:
                check_restart(Snapshot(place, read_back=False))
            elif not is_whole(place):
                raise CheckpointError(f"{shown_url(place)!r} is not whole")
        except (CheckpointError, OSError) as error:
            _log.warning(
                f"the log keeps its old files, which are needed without snapshot {number}: {error}"
            )
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
