"""Journal of a server: restores a shard and a coordinator from a log, then writes their changes to the log.

A standby's journal writes the records of its primary instead. log.py has the files, and recovery.py replays
the records.
"""

from collections.abc import Iterator

from psfleet.checkpoint import Snapshot, load_shard
from psfleet.core.base import crash_points
from psfleet.core.base.errors import CheckpointError, LogError
from psfleet.core.base.logs import log_of
from psfleet.core.base.object_store import is_whole, own_place
from psfleet.core.base.settings.kinds import shown_url, url_of
from psfleet.core.engine.shard.events import MakeCut, Record
from psfleet.core.engine.shard.shard import Shard
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

_log = log_of(__name__)


class Journal:
    """Restores a shard and a coordinator from a log, and then records their changes in the log.

    Args:
        log: The log.
        shard: Shard to restore and then to record.
        coordinator: The coordinator, or None on servers other than server 0.
        snapshots: Folder or URL of the snapshots that files of the log begin with, or empty if there are
            none.
        begins: True if the log may be new, because the server was never ready before.
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
        """Restore the state from the log, then record every change in the log.

        Args:
            load_path: Checkpoint to begin with if the log is new, or None.
            resume: Snapshot to continue from if the log is new, or empty.

        Returns:
            Number of records in the log.

        Raises:
            LogError: The log is damaged, or has a record that no server can have written.
        """
        # READY is written last. Without it an earlier process has ended while it loaded its first state, and
        # the log has only a part of that state: begin again with an empty log.
        fresh = set(self.log.files) == {0} and not any(
            kind == RecordKind.READY for kind, *_ in records(self.log.path)
        )
        if fresh and not self._begins:
            raise LogError(
                f"log {str(self.log.first)!r} does not hold what this server got when the number of servers "
                "changed; restore it, or start the job again from a snapshot"
            )
        count = self.log.forget() if fresh else self._replay()
        # After the replay, whose records must not be logged again, and before a checkpoint is loaded, which
        # must be logged.
        self.record_changes()
        if fresh:
            # Tables are logged as they are loaded, and so is the decision about the unused samples. Only a
            # state that is taken over as a whole needs a record of its own.
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
        """Write a record of the primary to the log of this standby. The first record empties the log.

        Raises:
            LogError: The record could not be written.
        """
        # The primary sends a whole copy first. The log is in this standby's own folder and so far useless: a
        # server starts from it only after `has_copy`.
        if not self._follows:
            self._follows = True
            self.log.forget()
        if kind == RecordKind.CUT:
            self.log.turn(cut_of(body), kind, [body])
        else:
            self.log.append(kind, [body])
        # Durable before this returns, because the primary then replies to its callers (rule R1).
        self.log.settle(self.log.end)

    def has_copy(self) -> None:
        """Note in this standby's log that the log holds the primary's whole state.

        From then on a server may start from it.
        """
        self.log.append(RecordKind.READY, [])
        self.log.settle(self.log.end)

    def record_changes(self) -> None:
        """Record this process's own changes from now on. A standby calls this when it becomes the primary."""
        self._shard.journal = self._keep
        if self._coordinator is not None:
            self._coordinator.journal = self._keep_decision

    def go_on_in(self, log: ServerLog) -> None:
        """Continue in `log`, which holds the whole state after a move of rows, and remove the present log."""
        before, self.log = self.log, log
        log.tracing = before.tracing
        before.settle(before.end)  # calls may still wait for the last record of the old log
        before.remove()

    def can_start_from(self, number: int) -> bool:
        """Return whether a server can start from a snapshot that was reported as finished.

        If not, the log of this process says why.

        For a snapshot in an object store this only checks that the manifest exists, which is written last.
        """
        if not self._snapshots:
            return False
        snapshot_place = own_place(self._snapshots, number)
        try:
            if url_of(snapshot_place) is None:
                check_restart(Snapshot(snapshot_place, read_back=False))
            elif not is_whole(snapshot_place):
                raise CheckpointError(f"{shown_url(snapshot_place)!r} is not whole")
        except (CheckpointError, OSError) as error:
            _log.warning(
                f"the log keeps its old files, which are needed without snapshot {number}: {error}"
            )
            return False
        return True

    def shorten(self, number: int) -> None:
        """Drop the records before a snapshot that a server can start from."""
        self.log.shorten(number)

    def _replay(self) -> int:
        base = begin(self.log.first, self._snapshots, self._shard, self._coordinator)

        def records_reached() -> Iterator[tuple[int, memoryview]]:
            for record in self.log.recover(base):
                crash_points.reach("replay")
                yield record

        return take_all(
            records_reached(), self.log.first, self._snapshots, self._shard, self._coordinator
        )

    def _keep(self, record: Record) -> None:
        if isinstance(record, MakeCut):
            self.log.turn(record.number, *encode(record))
        else:
            self.log.append(*encode(record))

    def _keep_decision(self, decision: Decision) -> None:
        self.log.append(*encode_change(decision))
