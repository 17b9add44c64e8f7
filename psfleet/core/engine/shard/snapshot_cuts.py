"""Cut of a snapshot: for each worker, the last push that the snapshot contains.

All shards use the same cut, so a snapshot is consistent without stopping training. In sync mode no further
round closes until all servers know the round after which they take the snapshot. In other modes each worker
marks its last push in the snapshot. Pushes after a mark wait until all marks, and all pushes before them,
have arrived. Numbers of cuts only rise; marks of an earlier cut are ignored (rules R11 and R12 of
docs/protocol.md).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from psfleet.core.base.errors import Later, NotReady, ProtocolError, PsfleetError


@dataclass
class PendingCut:
    """Snapshot that this shard has begun but not taken yet.

    Attributes:
        number: Number of the snapshot.
        round: Sync mode: round after which to take the snapshot. None while it is not known; no round closes
            then.
        members: Other modes: for each seat (worker rank), the incarnation (worker process) that is to mark
            its last push in the snapshot. None in sync mode.
        marks: For each seat that has done so, the number of its last push in the snapshot.
        addressed: For each of these seats, the last of its pushes in the snapshot that was sent to this
            server. It differs from the mark if the last push concerned other servers only.
        since: For a delta, number of the snapshot since which changes are needed. 0 for a full snapshot.
        remember: True if a later delta may need the changes since this snapshot.
    """

    number: int
    round: int | None = None
    members: Mapping[int, int] | None = None
    marks: dict[int, int] = field(default_factory=dict)
    addressed: dict[int, int] = field(default_factory=dict)
    since: int = 0
    remember: bool = False

    def check_round(self, last_closed: int, other_mode: str | None, server: int) -> None:
        """Raise an error if it is too late to take the snapshot after its round.

        Args:
            last_closed: Last round that this server has closed.
            other_mode: Mode of the fleet if it has no rounds, else None.
            server: Index of this server, for the error.

        Raises:
            ProtocolError: The fleet has switched its mode, or has closed a later round.
        """
        if self.round is None:
            return
        holds = f"snapshot {self.number} is to hold round {self.round}, but"
        if other_mode is not None:
            # No worker had joined when the round was chosen. Pushes are no longer in rounds.
            raise ProtocolError(
                f"{holds} the fleet now runs in mode {other_mode!r} on server {server}; take it again"
            )
        if self.round < last_closed:
            raise ProtocolError(f"{holds} round {last_closed} is closed on server {server}")


@dataclass
class CutState:
    """Snapshots of one shard.

    Attributes:
        last: Number of the last snapshot taken. It is part of the shard's state.
        under_way: The snapshot that was begun but not taken yet, or None. It is not part of the state: a
            shard that restarts does not know it.
        failure: Reason why the last snapshot that was begun was given up, or None. Not part of the state.
    """

    last: int = 0
    under_way: PendingCut | None = None
    failure: PsfleetError | None = None

    def begin_cut(self, cutting: PendingCut) -> None:
        """Begin a snapshot, and give up an earlier one that was not taken.

        Raises:
            ProtocolError: A later snapshot was taken or begun.
        """
        now = self.under_way
        if cutting.number <= self.last or (now is not None and cutting.number < now.number):
            raise ProtocolError(
                f"snapshot {cutting.number} comes after snapshot "
                f"{now.number if now else self.last}; numbers of snapshots must rise"
            )
        self.under_way, self.failure = cutting, None

    def mark_worker(
        self, number: int, worker: int, incarnation: int, last: int, addressed: int | None = None
    ) -> None:
        """Record that the snapshot contains a worker's pushes up to `last` (the worker's *mark*).

        A second mark of the worker is ignored.

        Args:
            number: Number of the snapshot. A mark for another snapshot is ignored.
            worker, incarnation: Rank of the worker, and number of its process.
            last: The worker's last push in the snapshot.
            addressed: The last push up to `last` that was sent to this server, or None if that is `last`.
        """
        now = self.under_way
        if now is None or number != now.number or now.members is None:
            return
        if now.members.get(worker) == incarnation:
            now.marks.setdefault(worker, last)
            now.addressed.setdefault(worker, last if addressed is None else addressed)

    def give_up(self, number: int | None = None, failure: PsfleetError | None = None) -> None:
        """Give up the snapshot of this number, or any snapshot that was begun if the number is None.

        Args:
            number: Number of the snapshot.
            failure: Reason, for the caller that requested the snapshot, or None if members change.
        """
        if self.under_way is not None and number in (None, self.under_way.number):
            self.under_way = None
            self.failure = failure or NotReady("a worker or a server came or went")

    def is_lost(self, number: int) -> bool:
        """Return whether the snapshot was given up before it was taken."""
        now = self.under_way
        return self.last < number and (now is None or now.number != number)

    def holds_rounds(self, last_closed: int) -> bool:
        """Return whether the round after `last_closed` has to wait for a snapshot (sync mode).

        A round waits in two cases: the shard does not know yet after which round to take the snapshot, or
        this round has closed and the snapshot is not taken yet.
        """
        now = self.under_way
        return (
            now is not None
            and now.members is None
            and (now.round is None or now.round <= last_closed)
        )

    def check_behind(self, worker: int, sequence: int, server: int) -> None:
        """Raise Later for a push that is not in the snapshot; the worker sends the push again later."""
        now = self.under_way
        if now is not None and sequence > now.marks.get(worker, sequence):
            raise Later(
                f"push {sequence} of worker {worker} comes after the cut of a snapshot "
                f"that server {server} has not made yet"
            )

    def is_due(
        self, last_closed: int, sequences: Mapping[int, int], leavers: Iterable[int]
    ) -> bool:
        """Return whether to take the snapshot now: after its round, or when all pushes in it have arrived.

        Args:
            last_closed: Last closed round.
            sequences: Last push of each worker, by rank.
            leavers: Ranks of workers that have left.
        """
        now = self.under_way
        if now is None:
            return False
        if now.members is None:
            return now.round is not None and now.round <= last_closed
        seats = set(now.members) - set(leavers)
        return all(
            # A shard that has applied a push beyond the mark can no longer take this snapshot.
            seat in now.marks and now.addressed[seat] <= sequences.get(seat, 0) <= now.marks[seat]
            for seat in seats
        )

    def complete_cut(self) -> int:
        """Record that the snapshot is taken; return its number."""
        assert self.under_way is not None
        self.last = self.under_way.number
        self.under_way = None
        return self.last
