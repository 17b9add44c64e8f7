"""What a script remembers is what it was between two steps, and comes back."""

import json

import numpy as np
import pytest

from psfleet.checkpoint.worker_state import Place, Remembered, read_states
from psfleet.errors import ConfigError, UsageError
from psfleet.optimizer.lr import StepDecay
from psfleet.settings.durations import Interval


def test_states_belong_to_steps() -> None:
    """A snapshot gets what things were after its step; a thing gets back what it was."""
    remembered, place, dice = Remembered(), Place(), np.random.default_rng(3)
    rate = StepDecay(0.1, step_size=2)
    for name, thing in (("place", place), ("dice", dice), ("rate", rate)):
        remembered.add(name, thing)
    drawn = []
    for step in range(1, 6):
        drawn.append(dice.random())
        rate.step()
        place.item = step
        remembered.capture(step)
    state = read_states(json.loads(remembered.state_at(3)))
    assert [step for step, _ in json.loads(remembered.state_at(-1))] == [1, 2, 3, 4, 5]
    again, there = np.random.default_rng(0), Place()
    other = StepDecay(0.1, step_size=2)
    for name, thing in (("place", there), ("dice", again), ("rate", other)):
        Remembered().add(name, thing, state[name])
    assert (there.item, again.random(), other.last_epoch) == (3, drawn[3], 3)


def test_what_cannot_be_remembered_is_refused() -> None:
    """No state, a state that is no JSON, a name that is taken."""
    remembered = Remembered()
    with pytest.raises(UsageError, match="no state_dict"):
        remembered.add("x", object())
    remembered.add("place", Place())
    with pytest.raises(UsageError, match="already"):
        remembered.add("place", Place())
    assert remembered.state_at(0) == b"" or remembered.state_at(-1) == b"[]"


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("60s", Interval(60.0)),
        ("1.5min", Interval(90.0)),
        ("1000 rounds", Interval(rounds=1000)),
        ("1 round", Interval(rounds=1)),
    ],
)
def test_intervals(text: str, interval: Interval) -> None:
    """Time or rounds."""
    assert Interval.parse(text, "x") == interval


@pytest.mark.parametrize("text", ["", "60", "0s", "rounds", "1.5 rounds", "-1s", "1 day"])
def test_no_intervals(text: str) -> None:
    """Anything else is a sentence that quotes it."""
    with pytest.raises(ConfigError, match="must be like 60s"):
        Interval.parse(text, "--snapshot-every")
