"""Which worker had the first value that was not finite."""

from pathlib import Path

from psfleet_launch.observability.job_history import read_history
from psfleet_server.engine.server_measurements import FirstNonFinite
from tests.observability.trainer import ID, STEP, WORKER
from tests.observability.watched import training
from tests.waiting import until

SENTENCE = f"worker {WORKER}, step {STEP}: the gradient for table 'users' has nan for id {ID}"


def test_the_earliest_of_all_workers_is_named_once() -> None:
    """However late its heartbeat comes: the others are only told of when all have been heard since."""
    first = FirstNonFinite()
    assert first.take("", at=0.0, now=1.0, oldest=0.5) == ""
    assert first.take("victim", at=9.5, now=10.0, oldest=9.2) == ""
    assert first.take("culprit", at=9.4, now=10.3, oldest=10.0) == "culprit"
    assert first.take("another", at=1.0, now=11.0, oldest=10.3) == ""


def test_a_worker_that_has_died_is_not_waited_for() -> None:
    """After some seconds the earliest is named without its heartbeat."""
    first = FirstNonFinite()
    assert first.take("victim", at=9.5, now=10.0, oldest=3.0) == ""
    assert first.take("victim", at=9.5, now=14.0, oldest=3.0) == ""
    assert first.take("", at=0.0, now=15.0, oldest=3.0) == "victim"


def test_a_job_names_the_worker_that_began(tmp_path: Path) -> None:
    """Not its victims, which say the same on the screen a moment earlier; every step with NaN counts."""
    with training(tmp_path, "spoilt", "--servers", "2", "--workers", "2") as job:
        screen = tmp_path / "screen"
        until(lambda: "first NaN" in screen.read_text(), screen.read_text)
        assert f"server 0: first NaN or infinity: {SENTENCE}\n" in screen.read_text()
        for rank in "01":
            count = "psfleet_nonfinite_pushes_total"
            until(lambda: job.value(count, rank=rank) > 10, "steps with NaN", every=0.2)  # noqa: B023  # at once
    said = [one.text for one in read_history(tmp_path / "psfleet-logs" / "spoilt").events]
    assert said.count(f"first NaN or infinity: {SENTENCE}") == 1
