"""Bounded staleness on real servers: nobody gets further ahead than was said, and nobody hangs."""

import contextlib
import threading

import numpy as np
import pytest

from psfleet.core.base.errors import DeadlineExceeded
from psfleet.core.engine.consistency import SspMode, SyncMode
from psfleet.core.engine.shard import events
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.session.retry_policy import Patience
from tests.consistency.workers import ready, step, taken, together
from tests.waiting import until

IDS = np.arange(64)
CLOSE = ConsistencySettings("ssp", staleness=1)


def leading(runtime: ModeSwitchRuntime) -> list[int]:
    """On each server the most steps that a worker was ahead."""
    return [server["leading_steps"] for server in runtime.stats()]


def test_a_late_copy_of_a_pull_does_not_keep_a_mode() -> None:
    """All workers rest, so a pull that waits then is a copy of one that was answered: with the switch it gets
    an error, and the mode changes. (The suite "ssp" of tests/protocol: the bound holds and nobody hangs.)

    The planted fault of `return [seat for seat in live if self.at.get(seat, 0) < slowest]`.
    """
    shard, ahead = Shard(0, 1, 2), events.Pull(0, 1, (), clock=3)
    for worker in range(2):
        shard.handle(events.Join(worker, 1, SspMode(staleness=1)), "join")
    for sequence in range(1, 4):
        for worker in range(2):
            shard.handle(events.Push(worker, 1, sequence, (), clock=sequence), "push")
    assert any(isinstance(each, events.SendValues) for each in shard.handle(ahead, "first"))
    for worker in range(2):
        shard.handle(events.Leave(worker, 1, 3, rest=1), "rest")
    for worker in range(2):
        shard.handle(events.Join(worker, 1, SspMode(staleness=1)), "join")
    assert shard.handle(ahead, "copy") == []
    switch = events.Join(0, 1, SyncMode(), switch=1, last=3)
    assert [type(each) for each in shard.handle(switch, "switch")] == [
        events.SendError,
        events.SendOutcome,
    ]
    assert shard.mode == "sync"
    assert not shard._waiting
    shard.validate()


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_slow_worker_is_not_left_behind(staleness: int) -> None:
    """One worker pauses: on both servers the other is never given values while it is
    more than `staleness` pushes ahead, it does get that far, and every push counts once."""
    leads: list[int] = []

    def work(runtime: ModeSwitchRuntime) -> None:
        for number in range(12):
            step(runtime, IDS)
            if runtime.worker_index == 1 and number == 5:
                until(lambda: leading(runtime) == [staleness] * 2)
        runtime.barrier()
        assert taken(runtime, IDS)[0] == 24
        leads.extend(leading(runtime))

    with LocalFleet(2, 2, in_process=True) as fleet:
        together(fleet, ConsistencySettings("ssp", staleness=staleness), work)
    assert set(leads) == {staleness}


def test_a_wait_ends_and_says_for_whom() -> None:
    """A worker whose peer has stopped is told after its deadline which one it waits for; one that is
    still waiting goes on when the peer has left."""
    with LocalFleet(1, 3, in_process=True) as fleet:
        patience = Patience(wait=2.0)
        fast, slow, third = (ready(fleet, worker, CLOSE, patience=patience) for worker in range(3))
        for _ in range(2):
            step(fast, IDS)
            step(third, IDS)
        with pytest.raises(DeadlineExceeded, match=r"2 pushes ahead .* it waits for worker 1$"):
            step(fast, IDS)
        patient = threading.Thread(target=step, args=(third, IDS))
        slow.close()
        patient.start()
        patient.join(60)
        assert not patient.is_alive()
        third.close()
        with contextlib.suppress(DeadlineExceeded):  # where a push has travelled with that pull
            fast.close()


def test_a_new_incarnation_begins_beside_the_slowest() -> None:
    """A worker that starts again does not make the others wait until it has done all their steps."""
    with LocalFleet(2, 2, in_process=True) as fleet:
        old, other = (ready(fleet, worker, CLOSE) for worker in range(2))
        for _ in range(6):
            step(old, IDS)
            step(other, IDS)
        other.flush()
        new = ready(fleet, 0, CLOSE)  # the process has died without a word and come back
        for _ in range(3):
            step(new, IDS)
            step(other, IDS)
        new.close()
        other.close()
        old.abandon()
