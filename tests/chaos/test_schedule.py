"""The schedule of chaos: seeded, and within what the job promises to survive."""

import itertools
from pathlib import Path

import pytest

from psfleet.testing.notes import Notes, read_pushed
from psfleet_launch.chaos import Trouble, schedule
from psfleet_launch.plan import Member, Request

COUNT = 300


def kinds(request: Request, seed: int = 1) -> set[tuple[str, str]]:
    """What is done to which role."""
    faults = itertools.islice(schedule(seed, request), COUNT)
    return {(fault.kind, fault.member.role) for fault in faults}


def test_a_seed_says_all() -> None:
    """The same seed gives the same faults in order of time, another one others."""
    request = Request(__file__, servers=2, workers=2, durability="log", worker_restarts=3)
    first, again, other = (
        list(itertools.islice(schedule(seed, request), COUNT)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert [fault.at for fault in first] == sorted(fault.at for fault in first)


def test_only_what_is_covered_is_done() -> None:
    """Without a log no server is killed; without restarts no worker; then nobody's disk is full."""
    pauses = {("pause", "server"), ("pause", "worker")}
    plain = Request(__file__, servers=2, workers=2)
    assert kinds(plain) == pauses
    log = Request(__file__, servers=2, workers=2, durability="log")
    assert kinds(log) == pauses | {("kill", "server")}
    every = Request(__file__, servers=2, workers=2, durability="log", worker_restarts=4)
    assert kinds(every) == pauses | {("kill", "server"), ("kill", "worker"), ("full", "server")}


@pytest.mark.parametrize("restarts", [1, 3])
def test_workers_die_as_often_as_they_come_back(restarts: int) -> None:
    """A full disk may end two workers."""
    request = Request(__file__, servers=2, workers=2, durability="log", worker_restarts=restarts)
    faults = list(itertools.islice(schedule(5, request), COUNT))
    killed = sum(fault.kind == "kill" and fault.member.role == "worker" for fault in faults)
    full = sum(fault.kind == "full" for fault in faults)
    assert killed + 2 * full == restarts


def test_what_is_paused_goes_on(tmp_path: Path) -> None:
    """Every stop is followed by a continue, also when the job does not train any more."""
    request = Request(__file__, servers=1, workers=1)
    trouble = Trouble(3, request, tmp_path)
    living = {Member("server", 0), Member("worker", 0)}
    signals: list[int] = []
    for tenth in range(600):
        strikes = trouble.due(tenth / 10, living, trains=tenth < 580)
        signals += [strike.signal for strike in strikes]
    stops, goes_on = signals.count(19), signals.count(18)
    assert stops == goes_on == len(trouble.done) > 5


def test_notes_say_what_was_acknowledged(tmp_path: Path) -> None:
    """By server, worker and life; a push that was only sent is not acknowledged."""
    notes = Notes(tmp_path)
    for number in (4, 5, 6):
        notes.sent(0, 1, 7, number)
    notes.acknowledged(0, 1, 7, 5)
    notes.sent(1, 1, 7, 4)
    found = read_pushed(tmp_path)
    assert {key: (p.first, p.last, p.acknowledged) for key, p in found.items()} == {
        (0, 1, 7): (4, 6, 5),
        (1, 1, 7): (4, 4, 0),
    }
