"""Schedules on paper: complete, in order, free of deadlock, and as long as theory says."""

import pytest

from psfleet.errors import ConfigError
from psfleet.program.pipeline.simulation import live_micro_batches, picture, validate
from psfleet.stages.schedule import Action, Schedule, Work, make_schedule


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_every_schedule_comes_to_an_end(kind: str) -> None:
    """Any number of stages and micro-batches: each piece of work once, in order, no standstill."""
    for stages in range(1, 7):
        for micro_batches in range(1, 15):
            for per_stage in (1, 2, 3) if kind != "zero-bubble" or stages == 1 else (1,):
                validate(make_schedule(kind, stages, micro_batches, per_stage))


def test_memory_is_bounded_by_the_stages() -> None:
    """gpipe keeps all micro-batches, 1f1b one for each stage behind, zero-bubble no more than S."""
    live = {
        kind: [live_micro_batches(make_schedule(kind, 4, 16), s) for s in range(4)]
        for kind in ("gpipe", "1f1b", "zero-bubble")
    }
    assert live == {"gpipe": [16] * 4, "1f1b": [4, 3, 2, 1], "zero-bubble": [4] * 4}


def test_queues_of_two_are_enough_for_1f1b() -> None:
    """Stages that alternate send nothing long before it is wanted."""
    validate(make_schedule("1f1b", 4, 12), queue_size=2)


def test_a_standstill_is_found() -> None:
    """Two stages that each wait for the other are named with what they wait before."""
    forward, back = (Action(Work.FORWARD, 0, c) for c in (0, 1)), Action(Work.BACKWARD, 0, 0)
    first, second = forward
    wrong = Schedule("1f1b", ((back, first), (second, Action(Work.BACKWARD, 0, 1))), 1, 2)
    with pytest.raises(ConfigError, match="stands still before B0, F0"):
        validate(wrong)
    with pytest.raises(ConfigError, match="stage 0 does F of chunk 0"):
        validate(Schedule("1f1b", ((back,), (second,)), 1, 2))


def test_pictures() -> None:
    """One line per stage, idle time as dots."""
    assert picture(make_schedule("1f1b", 2, 2)).splitlines() == [
        "stage 0  F0 F1 .. .. B0 -- .. B1 --",
        "stage 1  .. F0 B0 -- F1 B1 -- .. ..",
    ]
