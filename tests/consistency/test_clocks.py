"""Clocks of several shards under a random scheduler: the bound holds and nobody waits for ever."""

import random
from collections.abc import Hashable, Iterator

import pytest

from psfleet.core.engine.consistency import SspMode, SyncMode
from psfleet.core.engine.interface import Read
from psfleet.core.engine.shard.events import (
    Instruction,
    Join,
    Leave,
    Pull,
    Push,
    SendError,
    SendOutcome,
    SendValues,
)
from psfleet.core.engine.shard.shard import Shard

SERVERS, WORKERS, EPOCHS = 2, 3, 3
READS: tuple[Read, ...] = ()


class Fleet:
    """Shards, and workers whose next call is made when the one before it is answered everywhere."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.staleness = self.dice.randrange(3)
        self.shards = [Shard(index, SERVERS, WORKERS) for index in range(SERVERS)]
        for shard in self.shards:
            for worker in range(WORKERS):
                shard.handle(Join(worker, 1, SspMode(staleness=self.staleness)), "join")
        self.served: set[tuple[int, int]] = set()  # (server, worker) whose pull is answered
        self.at_collective: set[int] = set()
        self.clocks = [0] * WORKERS

    def call(self, event: Pull | Push | Leave) -> list[tuple[int, Pull | Push | Leave]]:
        """The same event for every server, in an order of its own, some of them twice."""
        calls = [(server, event) for server in range(SERVERS)]
        if not isinstance(event, Pull):
            calls += [call for call in calls if self.dice.random() < 0.3]
        self.dice.shuffle(calls)
        return calls

    def worker(self, worker: int) -> Iterator[None]:
        """One worker's calls; yields when it is another's turn."""
        sequence = 0
        for epoch in range(EPOCHS):
            clock = 0
            for _ in range(self.dice.randrange(6)):
                self.served -= {(server, worker) for server in range(SERVERS)}
                for server, event in self.call(Pull(worker, 1, READS, clock=clock)):
                    self.take(server, event, (server, worker))
                    yield
                while {(server, worker) for server in range(SERVERS)} - self.served:
                    yield
                sequence, clock = sequence + 1, clock + 1
                for server, event in self.call(Push(worker, 1, sequence, (), clock=clock)):
                    self.take(server, event, "push")
                    yield
            for server, event in self.call(Leave(worker, 1, sequence, rest=epoch + 1)):
                self.take(server, event, "rest")
                yield
            self.at_collective.add(worker)
            while worker in self.at_collective:
                if len(self.at_collective) == WORKERS:
                    self.at_collective.clear()
                yield

    def take(self, server: int, event: Pull | Push | Leave, call: Hashable) -> None:
        instructions: list[Instruction] = self.shards[server].handle(event, call)
        for instruction in instructions:
            assert not isinstance(instruction, SendError), instruction
            if isinstance(instruction, SendValues):
                assert isinstance(instruction.call, tuple)
                self.served.add(instruction.call)
        self.shards[server].validate()

    def run(self) -> None:
        """Workers take turns at random until all have ended."""
        alive = [self.worker(worker) for worker in range(WORKERS)]
        for _ in range(20_000):
            if not alive:
                return
            one = self.dice.choice(alive)
            if next(one, self) is self:
                alive.remove(one)
        raise AssertionError("the workers wait for each other")


@pytest.mark.parametrize("seed", range(10))
def test_nobody_is_too_far_ahead_and_nobody_waits_for_ever(seed: int) -> None:
    """Unequal steps, collectives, repeated messages, any interleaving on two servers."""
    fleet = Fleet(seed)
    fleet.run()
    assert all(shard.consistency.gate.leading_steps <= fleet.staleness for shard in fleet.shards)
    assert all(not shard._waiting for shard in fleet.shards)


def test_a_late_copy_of_a_pull_does_not_keep_a_mode() -> None:
    """All workers rest, so a pull that waits then is a copy of one that was answered: with the switch it gets
    an error, and the mode changes."""
    shard, ahead = Shard(0, 1, 2), Pull(0, 1, READS, clock=3)
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
