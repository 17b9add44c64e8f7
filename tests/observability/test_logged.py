"""fleet.log: what it takes, where values go, and how the launcher shows them."""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import psfleet
from psfleet import fleet
from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.observability.logged_values import NEWEST, EventFile
from psfleet.core.base.panels.process_panels import PANELS
from psfleet_launch.console.progress_line import frame_progress
from psfleet_launch.console.top import top_object, top_screen
from psfleet_launch.observability.fleet_reader import panel_texts
from psfleet_launch.observability.job_history import PastJob
from psfleet_launch.observability.job_view import logged, view_of
from psfleet_launch.observability.tensorboard_figures import FigureEvents
from tests.observability.event_files import scalars
from tests.refusals import check_refusals

IDS = np.arange(4)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has logged nothing, and trains alone."""
    psfleet.reset()
    yield
    psfleet.reset()
    assert not NEWEST


def test_steps_are_the_pushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a step a value stands at the number of pushes that were made; every value is kept at once."""
    monkeypatch.setenv("PSFLEET_TENSORBOARD", str(tmp_path))
    fleet.init()
    fleet.log("loss", 3)
    with psfleet.connect() as ps:
        table = ps.sparse_table("rows", 2, psfleet.optimizer.SGD(0.5))
        for step in range(3):
            table.push(IDS, np.ones((4, 2), np.float32)).wait()
            fleet.log("loss", np.float32(1 / 2**step))
    fleet.log("learning rate", np.array([0.125]), step=7)
    expected = [("loss", 0, 3), ("loss", 1, 1), ("loss", 2, 0.5), ("loss", 3, 0.25)]
    assert scalars(tmp_path / "worker.0") == [*expected, ("learning rate", 7, 0.125)]
    assert NEWEST == {"loss": 0.25, "learning rate": 0.125}


def test_nothing_is_written_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --tensorboard tensorboardX is not needed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    fleet.log("loss", 1.0)
    assert NEWEST == {"loss": 1.0}
    assert not [*tmp_path.iterdir()]


REFUSED = r"""
log("", 1)  # fleet.log got the name ''; it must be a line of at most 100 characters
log("a\nb", 1)  # fleet.log got the name 'a\nb'; it must be a line of at most 100 characters
log("a" * 101, 1)  # fleet.log got the name 'aaaaaa...aaa; it must be a line of at most 100 characters
log("loss", 10**400)  # fleet.log got 100000...000 for 'loss'; it must be one number
log("loss", "low")  # fleet.log got 'low' for 'loss'; it must be one number
log("loss", None)  # fleet.log got None for 'loss'; it must be one number
log("loss", np.ones(2))  # fleet.log got array([1., 1.]) for 'loss'; it must be one number
log("loss", 1, step=-1)  # ...step -1 for 'loss'; it must be a whole number
log("loss", 1, step=0.5)  # ...step is 0.5, it must be a whole number
log("loss", 1, step=2**63)  # ...step is 9223372036854775808, it must be a whole number"""


def test_what_is_no_value_is_refused() -> None:
    """One sentence quotes what was given, and nothing is logged; a step is what event files can hold."""
    check_refusals(REFUSED, {"log": fleet.log, "np": np})
    assert not NEWEST


def test_names_have_a_bound() -> None:
    """A script that makes names of its steps is stopped at the 101st; known names go on."""
    for number in range(100):
        fleet.log(f"loss {number}", number)
    with pytest.raises(
        UsageError, match="got the name 'loss 100' after 100 others; log at most 100"
    ):
        fleet.log("loss 100", 1)
    fleet.log("loss 0", 5)
    assert NEWEST["loss 0"] == 5


def test_a_missing_package_and_a_bad_folder_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence says what to install, or which folder cannot be written to."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--tensorboard is '.*file', which cannot be written to"):
        EventFile(tmp_path / "file")
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with pytest.raises(
        ConfigError, match=r"needs tensorboardX, .*: pip install '\.\[tensorboard\]'"
    ):
        EventFile(tmp_path)


def test_a_full_disk_does_not_end_the_training(tmp_path: Path) -> None:
    """What the disk does not take is no error, and is written once there is room."""
    file = EventFile(tmp_path)
    file.add({"loss": 1}, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        file.add({"loss": 2}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert scalars(tmp_path) == [("loss", 1, 1)]
    file.add({"loss": 3}, 3)
    file.close()
    assert scalars(tmp_path) == [("loss", step, step) for step in (1, 2, 3)]


SERIES = {
    "accuracy worker 0": 0.5,
    "accuracy worker 1": 0.75,
    "big loss worker 1": 3.0,
    "big loss worker 0": None,
}


def frame() -> dict[str, Any]:
    """As the recorder has it: figures of three panels."""
    replies = {
        "Logged values": SERIES,
        "Steps": {"": 12.0},
        "Loss": {"worker 0": 0.25, "worker 1": None},
    }
    return {"at": 1e9, "panels": [replies.get(panel.title, {}) for panel in PANELS]}


def test_the_launcher_shows_means() -> None:
    """Of each name the mean over the workers: behind the progress, and in `psfleet top`."""
    assert [*logged(SERIES)] == [("accuracy", "0.625"), ("big loss", "3")]
    assert frame_progress(frame()) == "12 steps · loss 0.25 · accuracy 0.625 · big loss 3"
    job = PastJob(
        {"job": "j", "began": 1e9, "machines": {}, "panels": panel_texts()}, frames=[frame()]
    )
    console = Console(width=200)
    with console.capture() as shown:
        console.print(top_screen(view_of(job, is_running=True)))
    assert frame_progress(frame()) in shown.get()


def test_speed_and_traffic_are_shown() -> None:
    """`psfleet top` has steps and bytes per second of each process, and --json the same as numbers."""
    rates = {
        "Steps per second": {"worker 0": 12.5},
        "Received by servers": {"server 0": 4_200.0},
        "Sent by servers": {"server 0": 1_234_000.0},
    }
    panels = [rates.get(panel.title, {}) for panel in PANELS]
    heading = {"job": "j", "began": 1e9, "machines": {}, "panels": panel_texts()}
    job = PastJob(heading, frames=[{"at": 1e9, "panels": panels}])
    console = Console(width=200)
    with console.capture() as shown:
        console.print(top_screen(view_of(job, is_running=True)))
    for text in ("steps", "12.5/s", "4.1 KiB/s", "1.18 MiB/s"):
        assert text in shown.get()
    assert top_object(view_of(job, is_running=True))["figures"] == rates


def test_figures_of_the_job_are_events(tmp_path: Path) -> None:
    """Each panel's series is a tag, at the job's steps; logged values are in the workers' own files."""
    events = FigureEvents(tmp_path)
    events.add_frame(frame())
    events.close()
    assert scalars(tmp_path) == [("Steps", 12, 12), ("Loss/worker 0", 12, 0.25)]
