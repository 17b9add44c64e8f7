"""Clocks of a shard in ssp mode. (The suite "ssp" of tests/protocol: the bound holds and nobody hangs.)"""

from psfleet.core.engine.consistency import SspMode, SyncMode
from psfleet.core.engine.shard.events import (
    Join,
    Leave,
    Pull,
    Push,
    SendError,
    SendOutcome,
    SendValues,
)
from psfleet.core.engine.shard.shard import Shard


def test_a_late_copy_of_a_pull_does_not_keep_a_mode() -> None:
    """All workers rest, so a pull that waits then is a copy of one that was answered: with the switch it gets
    an error, and the mode changes.

    The planted fault of `return [seat for seat in live if self.at.get(seat, 0) < slowest]`.
    """
    shard, ahead = Shard(0, 1, 2), Pull(0, 1, (), clock=3)
    for worker in range(2):
        shard.handle(Join(worker, 1, SspMode(staleness=1)), "join")
    for sequence in range(1, 4):
        for worker in range(2):
            shard.handle(Push(worker, 1, sequence, (), clock=sequence), "push")
    assert any(isinstance(each, SendValues) for each in shard.handle(ahead, "first"))
    for worker in range(2):
        shard.handle(Leave(worker, 1, 3, rest=1), "rest")
    for worker in range(2):
        shard.handle(Join(worker, 1, SspMode(staleness=1)), "join")
    assert shard.handle(ahead, "copy") == []
    switch = Join(0, 1, SyncMode(), switch=1, last=3)
    assert [type(each) for each in shard.handle(switch, "switch")] == [SendError, SendOutcome]
    assert shard.mode == "sync"
    assert not shard._waiting
    shard.validate()
