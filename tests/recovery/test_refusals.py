"""A push that is refused leaves nothing behind: its gradients may lie in memory that a worker shares."""

import gc
import weakref

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import Gap
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.shard.events import Join, Push
from psfleet.core.engine.shard.shard import Shard
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.replies import Deadlines
from tests.trainings import zero_rows

ROWS = zero_rows("rows")


def refused(host: ShardHost) -> "weakref.ref[NDArray[np.float32]]":
    """The gradient of a push that does not follow the one before it."""
    values = np.ones((1, 1), np.float32)
    gradient = Gradient(ROWS.key, values, np.zeros(1, np.int64), 1.0)
    try:
        host.ask(Push(0, 1, 7, (gradient,)))
    except Gap:  # pytest.raises would keep it
        return weakref.ref(values)
    raise AssertionError("the push was taken")


def test_a_refused_push_is_forgotten_at_once() -> None:
    """Without the help of the garbage collector, which may come after many such pushes."""
    host = ShardHost(Shard(), None, Deadlines())
    host.ask(Join(0, 1, find_mode("async")))
    host.shard.create(ROWS, np.empty(0, np.float32))
    gc.collect()
    gc.disable()
    try:
        assert refused(host)() is None
    finally:
        gc.enable()
