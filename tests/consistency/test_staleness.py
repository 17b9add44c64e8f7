"""How stale gradients are is counted as it is defined."""

import numpy as np

from psfleet.core.base.observability.exposition import StalenessHistogram
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.runtime_interface import Read
from psfleet.core.engine.shard.events import Join, Pull, Push
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.consistency.workers import DENSE, ROWS, give, ready, step


def test_pushes_of_others_since_the_own_pull() -> None:
    """Worker 0 pulls; 1 pushes twice; 0 pushes: staleness 2. Its own pushes do not count."""
    shard = Shard(workers=2)
    for worker in range(2):
        shard.handle(Join(worker, 1, find_mode("async")), "join")
        shard.handle(Pull(worker, 1, ()), "pull")
    for worker, sequence in ((1, 1), (1, 2), (0, 1), (0, 2), (1, 3)):
        shard.handle(Push(worker, 1, sequence, ()), "push")
        shard.handle(Push(worker, 1, sequence, ()), "repeat")
    assert shard.staleness.counts == {0: 2, 2: 3}
    shard.handle(Pull(0, 1, ()), "pull")
    shard.handle(Push(0, 1, 3, ()), "push")
    assert shard.staleness.counts == {0: 3, 2: 3}


def test_rounds_have_none() -> None:
    """In sync mode nothing is counted: every gradient is of the round before."""
    shard = Shard(workers=1)
    shard.handle(Join(0, 1, find_mode("sync")), "join")
    shard.handle(Push(0, 1, 1, ()), "push")
    shard.handle(Pull(0, 1, (), commit=1), "pull")
    assert (shard.rounds.closed, shard.staleness.counts) == (1, {})


def test_the_histogram_stays_small() -> None:
    """Large values are kept to a power of two."""
    staleness = StalenessHistogram()
    for _ in range(3000):
        staleness.pushed(1)
    for own in (300, 2999):
        staleness.pulled(0)
        for _ in range(own):
            staleness.pushed(1)
        staleness.pushed(0)
    assert staleness.counts[256] == staleness.counts[2048] == 1
    assert max(staleness.counts) == 2048


def test_servers_tell() -> None:
    """On a real fleet: a worker that pulls before another's three steps pushes with staleness 3; both
    servers say so."""
    ids = np.arange(4)
    with LocalFleet(2, 2, in_process=True) as fleet:
        slow, fast = (ready(fleet, worker, ConsistencySettings("async")) for worker in (0, 1))
        slow.pull([Read(DENSE.key), Read(ROWS.key, ids)])
        for _ in range(3):
            step(fast, ids)
        fast.flush()
        give(slow, ids)
        slow.flush()
        for server in slow.stats():
            assert server["staleness"] == {0: 3, 3: 1}
        slow.close()
        fast.close()
