"""Fast path for plain pushes and pulls, and replay of log records.

A call is *plain* if it needs no log record and does not concern a snapshot, a follower or a waiting pull. In
an asynchronous job without a log almost all calls are plain. `Shard.handle` gives the same result for every
call; this module is faster because it skips checks that cannot apply. If a call is not plain, nothing has
changed, and the caller passes it to `Shard.handle`.

`replay` applies the log records of an earlier process, one by one. After all records, the shard is in the
same state as the earlier process.
"""

from typing import Protocol

from psfleet.core.base.errors import ProtocolError, PsfleetError
from psfleet.core.engine.shard.events import (
    CloseRound,
    CreateTable,
    Evict,
    MakeCut,
    Pull,
    Push,
    Record,
    SendError,
)
from psfleet.core.engine.shard.membership_view import InstallView
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.updates import update


class TableUpdates(Protocol):
    """Gradients of a push that have passed `ShardTables.check_gradient`."""

    def fit(self, base: int) -> bool:
        """Return whether no id is repeated and the tables certainly have room for new ids.

        Args:
            base: Address of the message that has the gradients, as for `is_plain`.
        """

    def apply(self, base: int) -> None:
        """Update the tables, which have not changed since `fit`. `base` is the argument of `fit`."""


def may_be_plain(shard: Shard) -> bool:
    """Return whether the shard's present state and mode allow plain calls at all.

    A call is plain if it needs no log record and does not concern a snapshot, a follower or a waiting pull.
    """
    mode = shard.consistency.declared
    return shard.is_quiet and not (mode.has_rounds or mode.adds_deltas or mode.gate)


def is_plain(
    shard: Shard, push: Push | None, updates: TableUpdates, pull: Pull | None, base: int = 0
) -> bool:
    """Return whether `apply_plain_call` may apply this push and this pull. Call `may_be_plain` first.

    The push and the pull are the two parts of one call. Returns False for an invalid call too; `Shard.handle`
    then reports the error.

    Args:
        shard: The shard.
        push: The push, or None. Its `gradients` attribute is not read.
        updates: Gradients of the push.
        pull: The pull, or None.
        base: Address of the message that has the gradients. The updates contain offsets from this address.
    """
    try:
        if push is not None:
            # `push.cut` needs no check, because a quiet shard has begun no snapshot. A withdrawal belongs to
            # a round, which no plain call does.
            if push.withdrawn:
                return False
            shard.workers.admit(push.worker, push.incarnation)
            if not shard.workers.is_new_push(push) or not updates.fit(base):
                return False
        if pull is None:
            return True
        if push is None:  # else the push of the same call has been admitted
            shard.workers.admit(pull.worker, pull.incarnation)
        return not pull.commit and shard.consistency.is_ready(pull)
    except PsfleetError:
        return False


def apply_plain_call(
    shard: Shard, push: Push | None, updates: TableUpdates, pull: Pull | None, base: int = 0
) -> None:
    """Apply a push, a pull or both, after `is_plain` has accepted them.

    Hold the shard's lock from that check until this returns.
    """
    if push is not None:
        shard.recent.add(push)
        try:
            shard.note(push)
            updates.apply(base)
        except Exception as error:
            shard.tear(error)
            raise
        shard.counters.count(push, True)
    if pull is not None:
        shard.recent.add(pull)
        shard.serve(pull)


def replay(shard: Shard, record: Record) -> None:
    """Apply one record of the log. The shard's journal must be None, so that nothing is logged again.

    Raises:
        ProtocolError: The record cannot follow the records before it.
        PsfleetError: The record does not fit the tables. The shard may have a part of its change.
    """
    budget = shard.tables.budget
    # A record was accepted before, so replay must not refuse it.
    limit, budget.limit = budget.limit, None
    shard.replaying = True
    try:
        _apply_record(shard, record)
    finally:
        budget.limit, shard.replaying = limit, False


def _apply_record(shard: Shard, record: Record) -> None:
    match record:
        case CreateTable(spec, value, maker):
            shard.create(spec, value, maker)
        case CloseRound():
            _close(shard, record)
        case InstallView():
            shard.apply_view(record)
        case MakeCut(number):
            shard.cuts.last = number
        case Evict(key, ids):
            shard.tables.evict(key, ids)
        case _:
            for instruction in shard.handle(record, None):
                if isinstance(instruction, SendError):
                    raise instruction.error


def _close(shard: Shard, record: CloseRound) -> None:
    number, seats = shard.rounds.closed + 1, sorted(shard.rounds.held)
    if record.round != number or record.members != tuple(seats):
        raise ProtocolError(
            f"round {record.round} closes with the pushes of workers {list(record.members)}, "
            f"but round {number} holds those of {seats}"
        )
    update(shard.tables, shard.rounds.close())
    shard.workers.progress.update(record.progress)
