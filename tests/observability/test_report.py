"""The history of a job on the disk, and the report that is made of it."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from psfleet.core.base.errors import FrameError
from psfleet_launch.commands.psfleet_cli import main
from psfleet_launch.console.top import top_screen
from psfleet_launch.job.job_folder import HISTORY
from psfleet_launch.job.job_plan import Job, Member
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.observability.fleet_reader import panel_texts
from psfleet_launch.observability.job_history import (
    JobHistory,
    PastJob,
    heading,
    read_history,
    thinned,
)
from psfleet_launch.observability.job_timeline import JobEvent
from psfleet_launch.observability.job_view import state, view_of
from psfleet_launch.observability.page_and_report import (
    job_report,
    overview,
    slow_processes,
    tables,
)
from psfleet_launch.supervision.job_events import (
    FinishJob,
    KillHung,
    ProcessExited,
    ReportHung,
    Said,
    ServerReady,
    StartProcesses,
    StopRequested,
)
from psfleet_launch.supervision.standbys import PromoteStandby
from tests.observability.browser import CELLS, browser

SERVER, STANDBY, WORKER = Member("server", 1), Member("server", 1, copy=1), Member("worker", 0)
TITLES = [panel["title"] for panel in panel_texts()]


def begun(folder: Path) -> JobHistory:
    """The history of a new job."""
    job = Job(JobRequest(script=__file__, servers=2), "j", "", folder, folder)
    return JobHistory(folder, heading(job, "local", "0.1", {"here": [SERVER, WORKER]}))


def frame(at: float, **values: dict[str, float]) -> dict[str, Any]:
    """A frame of a few panels, whose titles have a `_` in place of blanks."""
    return {"at": at, "panels": [values.get(title.replace(" ", "_"), {}) for title in TITLES]}


def rows(job: PastJob, title: str) -> list[list[str]]:
    """Of a table of the report."""
    made = [*overview(view_of(job, is_running=False))["tables"], *tables(job)]
    return next((table["rows"] for table in made if table["title"] == title), [])


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Events and figures, those of a job that goes on included; the last line may be unfinished."""
    history = begun(tmp_path)
    history.take(StartProcesses((SERVER, WORKER)), 1.0)
    history.take(Said(None, "chaos: 1.5 s: server 1 is killed"), 2.0)
    history.add_frame(frame(100.5, Loss={"worker 0": 1 / 3, "worker 1": 0.25}))
    history.take(ProcessExited(WORKER, 1, cause="</script>"), 4.0)
    with open(tmp_path / HISTORY, "ab") as file:
        file.write(b'{"event":{"at":1.0,"kin')
    actual = read_history(tmp_path)
    assert [(one.kind, one.member, one.code, one.text) for one in actual.events] == [
        ("started", "server 1", None, ""),
        ("started", "worker 0", None, ""),
        ("said", "", None, "chaos: 1.5 s: server 1 is killed"),
        ("ended", "worker 0", 1, "</script>"),
    ]
    assert actual.events[3].at - actual.events[0].at == pytest.approx(3, abs=1e-3)
    assert actual.last("Loss") == {"worker 0": pytest.approx(1 / 3, rel=1e-8), "worker 1": 0.25}
    assert actual.heading["machines"] == {"here": ["server 1", "worker 0"]}
    assert actual.code is None
    history.close()


def test_the_golden_history(tmp_path: Path) -> None:
    """The file of format version 1 is read as what was written, and is written with the same bytes."""
    panel = {key: key for key in ("section", "title", "unit", "meaning", "advice", "by")}
    said = {
        "job": "flights",
        "psfleet": "0.1.0",
        "engine": "local",
        "script": "train.py",
        "settings": {"servers": 1, "strategy": {"consistency": {"mode": "sync"}}},
        "machines": {"local": ["server 0", "worker 0"]},
        "began": 1000.0,
        "panels": [panel],
    }
    history = JobHistory(tmp_path, said, epoch=1000.0)
    history.take(StartProcesses((SERVER, STANDBY)), 1.0)
    history.take(ServerReady(STANDBY, "unix:/s"), 2.0)
    history.take(ReportHung(SERVER, 5.0), 3.0)
    history.take(KillHung(SERVER, 6.0), 4.0)
    history.take(ProcessExited(SERVER, -9, cause="silent"), 5.0)
    history.take(PromoteStandby(STANDBY, SERVER, 2), 5.5)
    history.add_frame({"at": 1006.0, "panels": [{"0": 0.125, "1": None}]})
    history.take(Said(SERVER, "caf\u00e9"), 7.0)
    history.take(StopRequested(15), 8.0)
    history.take(FinishJob(143), 9.0)
    history.close()
    golden = Path(__file__).parents[1] / "goldens" / "formats" / "v1" / "launch"
    assert (tmp_path / HISTORY).read_bytes() == (golden / HISTORY).read_bytes()
    actual = read_history(golden)
    assert (actual.heading, actual.code) == (said, 143)
    assert actual.last("title") == {"0": 0.125, "1": None}
    assert actual.events[5] == JobEvent(1005.0, "ended", "server 1", -9, "silent")


def test_a_history_stays_small(tmp_path: Path) -> None:
    """The newest frames are all there, the oldest is, and the rest lie evenly; old events are counted."""
    history = begun(tmp_path)
    for n in range(1500):
        history.add_frame(frame(float(n)))
    for _ in range(4500):
        history.take(Said(None, "again"), 0.0)
    history.close()
    actual = read_history(tmp_path)
    times = [one["at"] for one in actual.frames]
    assert len(times) <= 600
    assert times[-100:] == list(map(float, range(1400, 1500)))
    assert times[0] < 20
    assert max(b - a for a, b in itertools.pairwise(times)) <= 20
    assert len(actual.events) + actual.dropped == 4500
    assert len(actual.events) <= 4000
    assert ["Events that are not kept", f"{actual.dropped:,}"] in rows(actual, "The job")


def test_moments_are_thinned_evenly() -> None:
    """Whatever their distances; moments that are few stay."""
    assert thinned([1.0, 2.0, 3.0], 4, 2) == [0, 1, 2]
    assert thinned([5.0] * 6, 4, 2) == [3, 4, 5]
    crowded = [0.0, *(50 + n / 100 for n in range(100)), 100.0, 101.0]
    assert [crowded[n] for n in thinned(crowded, 5, 1)] == [0.0, 50.99, 100.0, 101.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is damaged"),
        ("{}\n", "no job history of psfleet: its format is None"),
        ('{"format":"job history","version":9}\n', "has version 9 of the format 'job history'"),
        ('HEAD{"event":{"at":1.0}}\n', "lacks the field 'kind' in its event"),
        ('HEAD{"frame":{"at":1.0,"panels":[]}}\n', "has a frame of 0 panels"),
        ("HEAD{nonsense\n{}\n", "is damaged"),
        ("HEAD[]\n", r"has the line \[\], which is none of its kinds"),
    ],
)
def test_what_is_no_history_is_refused(tmp_path: Path, content: str, message: str) -> None:
    """In one sentence that names the file."""
    begun(tmp_path).close()
    path = tmp_path / HISTORY
    path.write_text(content.replace("HEAD", path.read_text()))
    with pytest.raises(FrameError, match=rf"history.jsonl' .*{message}"):
        read_history(tmp_path)


def test_a_full_disk_ends_the_history_alone(tmp_path: Path) -> None:
    """Whatever cannot be written is left out; what was written before can be read."""
    history = begun(tmp_path)
    history.take(FinishJob(0), 0.0)
    history.close()  # as an error of the disk does
    history.take(FinishJob(1), 1.0)
    assert read_history(tmp_path).code == 0
    history = begun(tmp_path / "nowhere")
    history.take(FinishJob(1), 1.0)
    history.close()


def test_a_takeover_lasts_from_the_death_to_the_reply(tmp_path: Path) -> None:
    """Each of death, takeover, answer and restart is a row, with its cause."""
    history = begun(tmp_path)
    history.take(StartProcesses((SERVER, STANDBY)), 0.0)
    history.take(ServerReady(STANDBY), 1.0)
    history.take(ProcessExited(SERVER, -9, cause="memory ran out"), 10.0)
    history.take(PromoteStandby(STANDBY, SERVER, 2), 10.5)
    history.take(ServerReady(STANDBY), 12.0)
    history.take(StartProcesses((SERVER,)), 13.0)
    history.take(FinishJob(3), 20.0)
    history.close()
    actual = read_history(tmp_path)
    assert [row[1:] for row in rows(actual, "Faults")] == [
        ["server 1", "ended with signal 9: memory ran out"],
        ["server 1 copy 1", "takes over from server 1"],
        ["server 1 copy 1", "has the place of server 1 2 s after its end"],
        ["server 1", "is started again"],
    ]
    assert rows(actual, "Processes") == [
        ["server 1", "here", "runs", "", "", ""],
        ["server 1 copy 1", "here", "in place of server 1", "", "", ""],
    ]
    assert state(actual, is_running=False).startswith("Ended with exit code 3 after ")


def test_a_browser_shows_what_went_wrong(tmp_path: Path) -> None:
    """Of a finished job in which a server was killed; what processes say is text and never HTML."""
    history = begun(tmp_path)
    history.take(StartProcesses((SERVER, STANDBY)), 0.0)
    history.take(ProcessExited(SERVER, -9, cause="</script><b>&amp;"), 10.0)
    history.take(PromoteStandby(STANDBY, SERVER, 2), 10.5)
    history.take(ServerReady(STANDBY), 12.0)
    history.add_frame(frame(14.0, Loss={"worker 0": 0.5, "worker 1": 0.25}))
    history.add_frame(frame(16.0, Loss={"worker 0": 0.375}))
    history.take(FinishJob(0), 20.0)
    history.close()
    actual = read_history(tmp_path)
    page = tmp_path / "report.html"
    page.write_text(job_report(actual))
    with browser() as opened:
        shown = opened(page.as_uri())
        assert shown.text_content("#state") == state(actual, is_running=False)
        for table in [*overview(view_of(actual, is_running=False))["tables"], *tables(actual)]:
            expected = [*filter(None, [table["columns"]]), *table["rows"]]
            assert shown.evaluate(CELLS, table["title"]) == expected
        values = """[...document.querySelectorAll('[data-title="Loss"] li')].map(
            one => [one.dataset.name, +one.dataset.value])"""
        assert dict(shown.evaluate(values)) == {"worker 0": 0.375, "worker 1": 0.25}


def test_the_slow_worker_is_named() -> None:
    """In sync mode all have its step time; it is the one that does not wait."""
    job = PastJob({"panels": panel_texts()})
    for at in range(3):
        job.frames.append(
            frame(
                float(at),
                Step_time_by_worker={"worker 0": 0.1, "worker 1": 0.1, "worker 2": 0.1},
                Time_in_pulls={"worker 0": 0.7, "worker 1": 0.1, "worker 2": 0.8},
                Time_waiting={"worker 0": 0.1, "worker 1": 0.0, "worker 2": 0.0},
            )
        )
    assert list(slow_processes(job)) == [
        ("worker 1", "100 ms", "90 ms", "4.50", "slow"),
        ("worker 0", "100 ms", "20 ms", "0.36", ""),
        ("worker 2", "100 ms", "20 ms", "0.36", ""),
    ]


def test_top_shows_every_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a job that is over the last known figures of each worker and server, and its last incidents."""
    history = begun(tmp_path)
    cores = {"server 0": 0.5, "worker 0": 1.25}
    history.add_frame(
        frame(1.0, Steps={"": 1204.0}, CPU_cores_in_use=cores, Loss={"worker 0": 0.5})
    )
    history.add_frame(frame(3.0, Steps={"": 1304.0}, Step_time_by_worker={"worker 0": 0.0125}))
    history.take(ProcessExited(SERVER, -9), 4.0)
    history.take(FinishJob(137), 5.0)
    history.close()
    Console(width=100).print(top_screen(view_of(read_history(tmp_path), is_running=False)))
    output = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert output[0][:6] == ["j", "Ended", "with", "exit", "code", "137"]
    assert output[1] == ["1,304", "steps", "·", "loss", "0.5"]
    assert output[3] == ["0", "1.25", "12.5", "ms", "0.5"]
    assert output[5] == ["0", "0.5"]
    assert output[6][1:] == ["server", "1:", "ended", "with", "signal", "9"]


def test_a_job_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So is one that was launched by an older psfleet, which kept no history."""
    logs = ["--log-dir", str(tmp_path)]
    assert main(["report", "j", *logs]) == 2
    assert (
        f"{str(tmp_path)!r} has no job 'j'; name its logs with --log-dir" in capsys.readouterr().err
    )
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "serverlog.0").touch()
    for command in ("report", "top"):
        assert main([command, "j", *logs]) == 2
        assert "history.jsonl' does not exist" in capsys.readouterr().err
