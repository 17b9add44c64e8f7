"""The schedule of snapshots that a server takes by itself: what it tells people."""

from concurrent.futures import Future
from typing import Any, cast

import pytest

from psfleet.core.base.errors import CheckpointError, Later, PsfleetError, rows_move
from psfleet.core.base.settings.kinds import SnapshotInterval
from psfleet_server.snapshots import snapshot_schedule
from psfleet_server.snapshots.snapshot_coordinator import SnapshotRequest
from psfleet_server.snapshots.snapshot_runner import SnapshotRunner
from psfleet_server.snapshots.snapshot_schedule import SnapshotSchedule
from tests.waiting import until


class FailingRunner:
    """Takes snapshots that end as they are told, one after the other; those behind them are complete."""

    def __init__(self, *errors: PsfleetError) -> None:
        self.errors = list(errors)
        self.taken = 0

    def take(self, request: SnapshotRequest) -> "Future[Any]":
        """Fail, or be done."""
        future: Future[Any] = Future()
        if self.errors:
            future.set_exception(self.errors.pop(0))
        else:
            self.taken += 1
            future.set_result(None)
        return future


def test_only_faults_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that has to wait, as rows move or a push is under way, is no fault; others are counted."""
    monkeypatch.setattr(snapshot_schedule, "_PAUSE", 0.0)
    waits = (rows_move(1), Later("push 2 comes after the cut"))
    runner = FailingRunner(*waits, *(CheckpointError(f"fault {n}") for n in (1, 2, 3, 4)))
    told: list[str] = []
    pushes = iter(range(1000))
    schedule = SnapshotSchedule(
        cast("SnapshotRunner", runner),
        SnapshotInterval.parse("1 round", "every"),
        lambda: next(pushes),
        tell=told.append,
    )
    schedule.start()
    until(lambda: runner.taken)
    schedule.stop()
    assert told[:4] == [
        "a snapshot could not be taken: fault 1; it is tried again",
        "a snapshot could not be taken 2 times in a row: fault 2; it is tried again",
        "a snapshot could not be taken 4 times in a row: fault 4; it is tried again",
        "snapshots are taken again, after 4 that failed",
    ]
