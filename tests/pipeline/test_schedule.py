"""Schedules on paper: complete, in order, free of deadlock, and as long as theory says."""

import pytest

from psfleet.errors import ConfigError
from psfleet.program.pipeline.simulation import live_micro_batches, picture, simulate, validate
from psfleet.stages.schedule import Action, Schedule, Work, make_schedule

_UNIT = {Work.FORWARD: 1.0, Work.BACKWARD: 2.0, Work.INPUT: 1.0, Work.WEIGHT: 1.0}


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_every_schedule_comes_to_an_end(kind: str) -> None:
    """Any number of stages and micro-batches: each piece of work once, in order, no standstill."""
    for stages in range(1, 7):
        for micro_batches in range(1, 15):
            for per_stage in (1, 2, 3) if kind != "zero-bubble" or stages == 1 else (1,):
                validate(make_schedule(kind, stages, micro_batches, per_stage))


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("micro_batches", [4, 8])
def test_bubbles_are_those_of_the_formulas(stages: int, micro_batches: int) -> None:
    """(S-1)/(M+S-1) for gpipe and 1f1b, with v chunks (S-1)/(vM+S-1), a third of it for ZB-H1."""
    idle = stages - 1
    for kind in ("gpipe", "1f1b"):
        bubble = simulate(make_schedule(kind, stages, micro_batches), _UNIT).bubble
        assert bubble == pytest.approx(idle / (micro_batches + idle))
    bubble = simulate(make_schedule("interleaved", stages, micro_batches, 2), _UNIT).bubble
    assert bubble == pytest.approx(idle / (2 * micro_batches + idle))
    bubble = simulate(make_schedule("zero-bubble", stages, micro_batches), _UNIT).bubble
    assert bubble == pytest.approx(idle / (3 * micro_batches + idle))


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
