"""Events that a shard takes past `Shard.handle`: plain pushes and pulls, and records of an earlier process.

Plain are those to which nothing else applies: most of an asynchronous fleet without a log. `Shard.handle`
takes them too. Here they take effect by the same functions after fewer questions. Whatever is not so plain is
left to `Shard.handle`, with nothing changed. A shard that has taken all records of an earlier process is what
that process was.
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
    """The gradients of a push, each checked (`ShardTables.check_gradient`)."""

    def fit(self, base: int) -> bool:
        """Return whether they name no id twice and the tables surely have room; `base`: as for `is_plain`."""

    def apply(self, base: int) -> None:
        """Update the tables, which have not changed since `fit`."""


def may_be_plain(shard: Shard) -> bool:
    """Return whether there are plain calls, whatever they ask."""
    mode = shard.consistency.declared
    return shard.is_quiet and not (mode.has_rounds or mode.adds_deltas or mode.gate)


def is_plain(
    shard: Shard, push: Push | None, updates: TableUpdates, pull: Pull | None, base: int = 0
) -> bool:
    """Return whether `take` may have a push, and the pull that came with it; see `may_be_plain` too.

    Whatever is wrong with them, it may not.

    Args:
        updates: Those of the push, whose own gradients do not count.
        base: Address from which the places of the updates count.
    """
    try:
        if push is not None:
            if push.withdrawn:  # of no cut: the shard is quiet
                return False
            shard.workers.admit(push.worker, push.incarnation)
            if not shard.workers.is_new_push(push) or not updates.fit(base):
                return False
        if pull is None:
            return True
        if push is None:
            shard.workers.admit(pull.worker, pull.incarnation)
        return not pull.commit and shard.consistency.is_ready(pull)
    except PsfleetError:
        return False


def take(
    shard: Shard, push: Push | None, updates: TableUpdates, pull: Pull | None, base: int = 0
) -> None:
    """Take what `is_plain` has found so, with no event of the shard since then."""
    if push is not None:
        shard.recent.add(push)
        shard.note(push)
        updates.apply(base)
        shard.counters.count(push, True)
    if pull is not None:
        shard.recent.add(pull)
        shard.serve(pull)


def replay(shard: Shard, record: Record) -> None:
    """Take one record; the shard's journal must be None.

    Raises:
        ProtocolError: The record cannot follow those before it.
        PsfleetError: It was refused then too, or does not fit the tables.
    """
    budget = shard.tables.budget
    limit, budget.limit = budget.limit, None  # what was accepted then is accepted now
    shard.replaying = True
    try:
        _take(shard, record)
    finally:
        budget.limit, shard.replaying = limit, False


def _take(shard: Shard, record: Record) -> None:
    match record:
        case CreateTable(spec, value, maker):
            shard.create(spec, value, maker)
        case CloseRound():
            _close(shard, record)
        case InstallView():
            shard.take_view(record)
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
