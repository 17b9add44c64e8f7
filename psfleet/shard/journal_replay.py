"""A shard takes the records of an earlier process once more, and is then what that process was."""

from psfleet.errors import ProtocolError
from psfleet.shard.events import CloseRound, CreateTable, Evict, MakeCut, Record, SendError
from psfleet.shard.membership_view import InstallView
from psfleet.shard.shard import Shard
from psfleet.shard.updates import update


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
