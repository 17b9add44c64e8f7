"""Recovery of a server's state from its log and snapshots. The journal (journal.py) then writes the log.

The log holds records of the shard and decisions of the coordinator in the order in which they took effect.
Replay runs every record through the same code again, so a restarted server is bit-identical to the one that
crashed. Open this file when a server does not start, or starts with another state than it had.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from psfleet.checkpoint import Snapshot
from psfleet.core.base.errors import CheckpointError, LogError
from psfleet.core.base.json_documents import reading
from psfleet.core.base.logs import log_of
from psfleet.core.base.object_store import is_whole, own_place
from psfleet.core.base.settings.environment import Environment
from psfleet.core.engine.schema.table import BLOCK
from psfleet.core.engine.shard.event_shortcuts import replay
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.shard_state import ShardState
from psfleet.core.net.frame import Part
from psfleet.core.net.membership_messages import agreed_numbers
from psfleet.core.net.server_state import ServerState, read_state
from psfleet_server.coordinator.barriers import CollectiveState, ModeSwitch
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.data_dispatch import DataDispatch
from psfleet_server.durability.log import LogHeader, ServerLog, chained, files_of
from psfleet_server.durability.log_place import log_path
from psfleet_server.durability.records import (
    RecordKind,
    become,
    decode,
    encode_state,
    read_decision,
    server_state,
)

_log = log_of(__name__)


def restored(first: Path, snapshots: str, shard: Shard, coordinator: Coordinator | None) -> int:
    """Restore a shard and a coordinator from a log that is only read. Returns the number of records.

    Args:
        first: Path of the log's first file, which may have been removed.
        snapshots: Folder or URL of the snapshots that later files of the log begin with.
        shard: An empty shard of the log's server.
        coordinator: A new coordinator, or None if the server is not server 0.

    Raises:
        LogError: The log is damaged, or has a record that no server can have written.
    """
    base = begin(first, snapshots, shard, coordinator)
    records = ((kind, body) for kind, body, *_ in chained(first, base) if kind)
    return take_all(records, first, snapshots, shard, coordinator)


def begin(first: Path, snapshots: str, shard: Shard, coordinator: Coordinator | None) -> int:
    """Restore the last finished snapshot with which a file of the log begins.

    Returns:
        Number of the snapshot, or 0 if the log begins without one.

    Raises:
        LogError: The log begins with a snapshot that is missing or cannot be read.
    """
    files, why = files_of(first), ""
    for number in sorted(files, reverse=True):
        if number == 0:
            return 0
        # Without a place for snapshots no file was ever removed (`can_start_from`): begin with file 0.
        if not snapshots:
            continue
        try:
            snapshot = Snapshot(own_place(snapshots, number))
            with reading(snapshot.path):
                state = _checked_state(snapshot, shard.index)
        except (CheckpointError, OSError) as error:
            # If this snapshot was never completed, for example because the server died, the log's earlier
            # files are still there: only a complete snapshot removes them. Snapshot checks every byte, and
            # the state is decoded, so damage or another version is found while the shard is still empty and
            # an earlier snapshot can be tried.
            why = why or f": {error}"  # of the newest snapshot, the one to restore
            continue
        # Tables before the rest of the state: its held pushes name them, and each table that is made or
        # filled is checked against the memory that held pushes will need.
        for event in snapshot.events(shard.index, shard.servers, own=True):
            replay(shard, event)
        _become(state, shard, coordinator)
        return number
    raise LogError(
        f"log {str(first)!r} goes on from snapshot {min(files, default=0)}, which cannot be had{why}; "
        "restore it, or start the job again from a snapshot"
    )


def take_all(
    records: Iterable[tuple[int, memoryview]],
    first: Path,
    snapshots: str,
    shard: Shard,
    coordinator: Coordinator | None,
) -> int:
    """Apply the records of a log in order, and return their number.

    Raises:
        LogError: A record cannot be applied, or the log's last file is missing.
    """
    count = cut = 0
    for kind, body in records:
        count += 1
        try:
            take(kind, body, shard, coordinator)
        # Catch any exception, because a damaged or foreign record may contain anything.
        except Exception as error:
            raise LogError(
                f"record {count} of log {str(first)!r} cannot be taken: "
                f"{error}; read it with the psfleet version that wrote it, or start the job again from a "
                "snapshot"
            ) from None
        if kind == RecordKind.CUT:
            cut = shard.cuts.last
    # A cut without a file of its own is no fault if its snapshot was given up, for example because the file
    # could not be made. A complete snapshot had one.
    if snapshots and cut > max(files_of(first)) and is_whole(own_place(snapshots, cut)):
        raise LogError(
            f"log {str(first)!r} goes on in a file that begins with snapshot {cut} and is missing; "
            "restore it, or start the job again from a snapshot"
        )
    return count


def check_restart(snapshot: Snapshot) -> None:
    """Check that servers can start from a snapshot, by reading all of its state except the tables.

    Raises:
        CheckpointError: A part of the state cannot be read.
    """
    with reading(snapshot.path):
        for index in range(len(snapshot.manifest.files)):
            _checked_state(snapshot, index)


def _checked_state(snapshot: Snapshot, index: int) -> ServerState:
    """Return a server's state without its tables, once it is certain that a server can start from it."""
    list(snapshot.specs(index))
    state = snapshot.server(index)
    # Into throwaway objects. One worker fits any job, because `become` replaces the coordinator's seats.
    _become(state, Shard(), None if index else Coordinator(1))
    return state


def go_on_from(path: str, shard: Shard, coordinator: Coordinator | None) -> ServerState | None:
    """Restore one server of a fleet that continues from a snapshot. The number of servers may differ.

    If the number of workers differs too, the snapshot's rounds and worker processes have no meaning for the
    new job. Then only the tables and the unused samples of the datasets are restored.

    Returns:
        The server's state without the tables, or None if the number of workers differs.

    Raises:
        CheckpointError: The snapshot is missing, incomplete or damaged. Nothing was changed.
    """
    snapshot = Snapshot(path)
    # Every server takes the state of server 0, which gets every push. With another number of servers, some
    # servers have no state in the snapshot. Read before the tables are loaded, so that damage changes
    # nothing.
    state = snapshot.server(0)
    snapshot.load(shard)
    if _count(state) != shard.workers.count:
        if coordinator is not None:
            coordinator.go_on_with(_left(state))
        return None
    _resume(state, shard, coordinator)
    return state


def workers_of(path: str) -> int:
    """Return the number of workers of the job that took the snapshot."""
    return _count(Snapshot(path).server(0))


def _count(state: ServerState) -> int:
    return len(state.shard.consistency.rounds.seats)


def _left(state: ServerState) -> DataDispatch:
    """Return the samples that the snapshot's job has not used, to be distributed to other workers."""
    # In throwaway objects, because the new job must not get the rounds and worker processes of the state.
    shard, coordinator = Shard(), Coordinator(1)
    _become(state, shard, coordinator)
    positions = {
        incarnation: shard.workers.positions[worker]
        for worker, incarnation in shard.workers.incarnations.items()
        if worker in shard.workers.positions
    }
    return coordinator.dispatch.left(shard.rounds.closed, positions)


def _resume(state: ServerState, shard: Shard, coordinator: Coordinator | None) -> None:
    """Restore the state of an earlier job, for a job with as many workers.

    All workers start their scripts again, so collectives are numbered from 1 again.
    """
    _become(state, shard, coordinator)
    shard.rounds.go_back()  # the new scripts push the open round again
    # Scripts continue at the loop position in their own states of the snapshot, not at the position of the
    # last push.
    shard.workers.progress.clear()
    if coordinator is not None:
        for seat in coordinator.members.seats.values():
            seat.progress, seat.rests = "", 0
        # The last switch stays: a worker that registers learns the present mode from it. Everything else
        # about collectives is dropped, because scripts begin again with the first one.
        consistency = shard.consistency
        switch = None
        if consistency.mode is not None and consistency.switches:
            switch = ModeSwitch(consistency.switches, agreed_numbers(consistency.declared), {}, {})
        coordinator.collectives = CollectiveState(switch=switch)
        # Scripts request their datasets again, perhaps with more epochs than the earlier job was to train.
        coordinator.dispatch.inherit()


def _become(state: ServerState, shard: Shard, coordinator: Coordinator | None) -> None:
    if coordinator is not None:  # first, because this part may fail
        if state.coordinator is None:
            raise CheckpointError("the snapshot holds no decisions of a coordinator")
        become(coordinator, state.coordinator)
    shard.become(state.shard)


def copied(state: ShardState, coordinator: Coordinator | None) -> tuple[int, list[Part]]:
    """Return the record that ends a standby's copy of a shard: the server's state without its tables."""
    return encode_state(RecordKind.COPIED, server_state(state, coordinator))


def _be_copy(state: ServerState, shard: Shard, coordinator: Coordinator | None) -> None:
    _become(state, shard, coordinator)
    # Commits are in no record, so a log or a standby could not reproduce them from here. Workers commit
    # again.
    shard.rounds.committed.clear()
    # `Workers.become` leaves out the view, because a server that restarts waits for a new one (rule R6). A
    # standby has the view of its primary.
    shard.workers.view = shard.workers.promised = state.shard.workers.view


def take(kind: int, body: memoryview, shard: Shard, coordinator: Coordinator | None) -> None:
    """Apply a record of the server's log, or one that a standby gets from its primary.

    Raises:
        PsfleetError: The record does not fit the state. The shard may have a part of its change.
    """
    if kind == RecordKind.CORE:
        _resume(read_state(body), shard, coordinator)
    elif kind == RecordKind.COPIED:
        _be_copy(read_state(body), shard, coordinator)
    elif kind == RecordKind.DECISION:
        if coordinator is None:
            raise LogError("it is of a coordinator, which this server is not")
        coordinator.replay(read_decision(body))
    elif kind == RecordKind.READY:
        if body:
            raise LogError("its body is not empty")
    else:
        replay(shard, decode(kind, body))


def open_log(
    environment: Environment,
    tell: Callable[[str], None] = _log.warning,
    generation: int = 0,
    servers: int = 0,
) -> ServerLog | None:
    """Open the log that the environment's settings require. Returns None if the server keeps no log.

    Args:
        environment: Environment of the server.
        tell: Shows a line on the console.
        generation: Generation of the log, which rises with each change of the number of servers.
        servers: Number of servers in that generation. 0 means the number in the environment.
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
        tell=tell,
        # A standby does not wait for room, because its primary's replies would wait too. It fails instead,
        # and the launcher replaces it.
        waits=not environment.standby,
    )
