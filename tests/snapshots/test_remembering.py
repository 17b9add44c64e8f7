"""What a script remembers is what it was between two steps, and comes back."""

import json

import numpy as np
import pytest

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.settings.kinds import SnapshotInterval
from psfleet.core.engine.worker_state import LoopPosition, WorkerState, read_states
from psfleet.optimizer.lr import StepDecay


def test_states_belong_to_steps() -> None:
    """A snapshot gets what things were after its step; a thing gets back what it was."""
    worker_state, place, dice = WorkerState(), LoopPosition(), np.random.default_rng(3)
    rate = StepDecay(0.1, step_size=2)
    for name, thing in (("place", place), ("dice", dice), ("rate", rate)):
        worker_state.add(name, thing)
    drawn = []
    for step in range(1, 6):
        drawn.append(dice.random())
        rate.step()
        place.item = step
        worker_state.capture(step)
    state = read_states(json.loads(worker_state.state_at(3)))
    assert [step for step, _ in json.loads(worker_state.state_at(-1))] == [1, 2, 3, 4, 5]
    again, there = np.random.default_rng(0), LoopPosition()
    other = StepDecay(0.1, step_size=2)
    for name, thing in (("place", there), ("dice", again), ("rate", other)):
        WorkerState().add(name, thing, state[name])
    assert (there.item, again.random(), other.last_epoch) == (3, drawn[3], 3)


def test_what_cannot_be_remembered_is_refused() -> None:
    """An object without a state, and a name that is taken."""
    worker_state = WorkerState()
    with pytest.raises(UsageError, match="no state_dict"):
        worker_state.add("x", object())
    worker_state.add("place", LoopPosition())
    with pytest.raises(UsageError, match="already"):
        worker_state.add("place", LoopPosition())
    assert worker_state.state_at(-1) == b"[]"


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("60s", SnapshotInterval(60.0)),
        ("1.5min", SnapshotInterval(90.0)),
        ("1000 rounds", SnapshotInterval(rounds=1000)),
        ("1 round", SnapshotInterval(rounds=1)),
    ],
)
def test_intervals(text: str, interval: SnapshotInterval) -> None:
    """Time or rounds."""
    assert SnapshotInterval.parse(text, "x") == interval


@pytest.mark.parametrize("text", ["", "60", "0s", "rounds", "1.5 rounds", "-1s", "1 day"])
def test_no_intervals(text: str) -> None:
    """Anything else is a sentence that quotes it."""
    with pytest.raises(ConfigError, match="must be like 60s"):
        SnapshotInterval.parse(text, "--snapshot-every")
