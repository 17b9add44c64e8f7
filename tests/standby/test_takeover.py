"""Servers that die beside a standby: it takes over, and nothing that was acknowledged is lost.

Processes die at named points or by SIGKILL at seeded steps; whoever decides about takeovers is the
launcher's own code (psfleet_launch.supervision.job_events).
"""

import signal
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet.core.base.errors import DeadlineExceeded
from psfleet.core.client import Client
from psfleet.core.engine.runtime_interface import Read, TableState
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.optimizer import Adam
from psfleet_server.durability.log_shipping import DEPOSED
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.push_counts import COUNT, TOTAL, count_pushes
from tests.standby.pairs import Pairs
from tests.trainings import TrainingWorkload, same_bits, train_together
from tests.waiting import pause

TRAINING = TrainingWorkload()


class Watched(ClusterRuntime):
    """A runtime that does something before some of its pushes."""

    hooks: Mapping[int, Callable[[], None]]

    def push(self, *arguments: Any, **named: Any) -> Any:
        """The same, with what is to be done before it."""
        self.count = getattr(self, "count", 0) + 1
        if self.count in self.hooks:
            self.hooks[self.count]()
        return super().push(*arguments, **named)


def train(fleet: Pairs, hooks: Mapping[int, Callable[[], None]] | None = None) -> list[TableState]:
    """Sync training by every worker, with what worker 0 does between; the tables that it reads."""

    def connect(worker: int) -> Watched:
        runtime = Watched(fleet.environment(worker), "sync")
        runtime.hooks = hooks or {} if worker == 0 else {}
        return runtime

    fleet.await_standbys()
    with fleet.deciding():
        states = train_together(fleet.workers, TRAINING, connect)
        fleet.await_end()
    return states


@pytest.fixture(scope="module")
def alone() -> list[TableState]:
    """The result of one worker without any server."""
    runtime = EmbeddedRuntime()
    TRAINING.run(runtime)
    return TRAINING.result(runtime)


@pytest.mark.long
def test_primaries_die_at_every_point(alone: list[TableState]) -> None:
    """One after the other, before and after a record goes to the standby, and before and after its answer: no
    bit changes."""
    points = ["feed:9", "fed:9", "waiting:9", "followed:9"]
    with Pairs(1, 1, crashes={0: points}) as fleet:
        hooks = dict.fromkeys(range(2, TRAINING.steps), fleet.await_standbys)
        same_bits(train(fleet, hooks), alone)
        assert (fleet.takeovers, fleet.lost) == (len(points), 0)


@pytest.mark.long
def test_standbys_die_at_every_point(alone: list[TableState]) -> None:
    """Before and after one takes a record: its primary goes on, with another standby."""
    with Pairs(1, 1, crashes={0: ["", "receive:9", "took:9"]}) as fleet:
        hooks = dict.fromkeys(range(2, TRAINING.steps), fleet.await_standbys)
        same_bits(train(fleet, hooks), alone)
        assert (fleet.takeovers, fleet.lost) == (0, 2)


def test_every_push_is_counted_once() -> None:
    """Async mode: tables that count pushes count each one once, whichever primaries die."""
    with Pairs(2, 2, "tcp", crashes={0: ["waiting:40"], 1: ["followed:60"]}) as fleet:
        fleet.await_standbys()
        with fleet.deciding():
            count_pushes(fleet)
            fleet.await_end()
        assert fleet.takeovers == 2


def test_a_deposed_primary_replies_to_nobody() -> None:
    """It is stopped, its standby takes over, and it goes on: it ends, the push is counted once."""
    with Pairs(1, 1) as fleet:
        fleet.await_standbys()
        runtime = ClusterRuntime(fleet.environment(0), "async")
        runtime.create(TOTAL, np.zeros(9000, np.float32))
        runtime.push([COUNT])
        runtime.flush()
        deposed = fleet.process(0)
        pause(deposed)
        runtime.push([COUNT])  # waits at the one that is stopped
        fleet.promote(0)
        fleet.await_standbys()
        assert deposed.poll() is None
        deposed.send_signal(signal.SIGCONT)
        assert deposed.wait(60) == DEPOSED
        runtime.flush()
        assert (runtime.pull([Read(TOTAL.key)])[0] == 2).all()
        runtime.close()


def test_a_primary_without_its_standby_replies_to_nobody() -> None:
    """The standby is stopped: a push waits, until the launcher says that it will never take over."""
    with Pairs(1, 1) as fleet:
        fleet.await_standbys()
        runtime = ClusterRuntime(fleet.environment(0), "async")
        runtime.create(TOTAL, np.zeros(9000, np.float32))
        follower = fleet.follower(0)
        pause(follower)
        runtime.push([COUNT])
        with pytest.raises(DeadlineExceeded):
            runtime.flush(timeout=0.5)
        follower.send_signal(signal.SIGKILL)
        with fleet.deciding():
            runtime.flush()
        assert fleet.lost == 1
        assert (runtime.pull([Read(TOTAL.key)])[0] == 1).all()
        runtime.close()


def test_both_die_with_a_log(alone: list[TableState]) -> None:
    """With a log too: who took over has one of its own, from which it goes on when it dies alone."""

    def kill() -> None:
        fleet.await_standbys()
        fleet.process(0).send_signal(signal.SIGKILL)

    def kill_both() -> None:
        fleet.await_standbys()
        fleet.follower(0).send_signal(signal.SIGKILL)
        fleet.process(0).send_signal(signal.SIGKILL)

    with Pairs(1, 1, durability="log") as fleet:
        same_bits(train(fleet, {10: kill, 30: kill_both}), alone)
        # The standby may have been promoted when it was dead already: its log is as good.
        assert fleet.takeovers in (1, 2)
        assert "back after" in fleet.logs()


IDS = np.arange(40)


def test_a_reader_follows_a_takeover() -> None:
    """It goes on with the same values, and then with those of pushes that only the standby has got."""
    with Pairs(2, 1) as fleet:
        fleet.await_standbys()
        with fleet.deciding(), Client(fleet.connect(0, "sync")) as ps:
            users = ps.sparse_table("users", 3, Adam(0.1))
            users.push(IDS, np.ones((40, 3)))
            before = users.pull(IDS).tobytes()
            with psfleet.connect(job=fleet.endpoints) as reader:
                table = reader.sparse_table("users")
                assert table.pull(IDS).tobytes() == before
                fleet.process(1).send_signal(signal.SIGKILL)
                assert table.pull(IDS).tobytes() == before
                users.push(IDS, np.ones((40, 3)))
                after = users.pull(IDS).tobytes()
                assert table.pull(IDS).tobytes() == after != before
            assert fleet.takeovers == 1
