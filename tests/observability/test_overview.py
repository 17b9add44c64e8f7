"""The first screen of a job's page and of its report."""

import hashlib
import re
import signal
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from psfleet.core.base.logs import FIRST_NONFINITE
from psfleet.core.base.panels.panel import number_text
from psfleet.core.base.panels.process_panels import PANELS
from psfleet_launch.job.job_plan import Job, Member
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.observability.job_history import JobHistory, PastJob, heading
from psfleet_launch.observability.job_timeline import JobEvent
from psfleet_launch.observability.job_view import fired_alerts, state, view_of, zone
from psfleet_launch.observability.page_and_report import dashboard_page, job_report
from psfleet_launch.observability.page_and_report import overview as drawn
from psfleet_launch.supervision.job_events import (
    Action,
    Event,
    FinishJob,
    ProcessExited,
    Said,
    ServersMoved,
    Shown,
    StartProcesses,
)
from psfleet_launch.supervision.standbys import PromoteStandby
from tests.observability.browser import browser

SERVERS = Member("server", 0), Member("server", 1)
WORKERS = Member("worker", 0), Member("worker", 1)
STANDBY = Member("server", 1, copy=1)
TITLES = [panel.title for panel in PANELS]
PHONE = {"width": 420, "height": 800}


def job(folder: Path, *items: Event | Shown | Action, frames: Any = ()) -> PastJob:
    """A job to which these things have happened, a second each, with these figures every 2 s."""
    asked = Job(JobRequest(script=__file__, servers=2, workers=2), "j", "", folder, folder)
    history = JobHistory(
        folder, heading(asked, "local", "0.1", {"here": [*SERVERS, *WORKERS]}), 0.0
    )
    for now, item in enumerate(items):
        history.take(item, float(now))
    history.close()
    for n, one in enumerate(frames):
        history.add_frame({"at": 2.0 * n, "panels": [one.get(title, {}) for title in TITLES]})
    return history.so_far()


def overview(past: PastJob, is_running: bool) -> dict[str, Any]:
    """What the page shows above its charts."""
    return drawn(view_of(past, is_running))


def words(past: PastJob) -> dict[str, str]:
    """What each process does."""
    return {one.name: one.words for one in view_of(past, is_running=True).processes}


def figure(past: PastJob, label: str, is_running: bool = True) -> list[str]:
    """Value, note and mood of a figure."""
    return next(one[1:] for one in overview(past, is_running)["figures"] if one[0] == label)


def test_a_dead_server_is_named(tmp_path: Path) -> None:
    """In the badge and the table of processes; the job's other processes run."""
    past = job(tmp_path, StartProcesses((*SERVERS, *WORKERS)), ProcessExited(SERVERS[1], -9))
    assert overview(past, True)["badge"] == ("runs without server 1", "bad")
    assert words(past) == {
        "server 0": "runs",
        "server 1": "dead: signal 9",
        "worker 0": "runs",
        "worker 1": "runs",
    }


def test_a_process_that_has_come_back_runs(tmp_path: Path) -> None:
    """By a restart or a takeover; the death stays in the figures."""
    past = job(
        tmp_path,
        StartProcesses((*SERVERS, STANDBY, *WORKERS)),
        ProcessExited(WORKERS[0], 1),
        StartProcesses((WORKERS[0],)),
        ProcessExited(SERVERS[1], -9),
        PromoteStandby(STANDBY, SERVERS[1], 2),
    )
    assert overview(past, True)["badge"] == ("runs", "good")
    assert words(past) == {
        "server 0": "runs",
        "server 1 copy 1": "in place of server 1",
        "worker 0": "runs, restarted once",
        "worker 1": "runs",
    }
    assert figure(past, "Deaths") == ["2", "1 restart, 1 takeover", "bad"]


def test_what_the_launcher_stops_is_not_dead(tmp_path: Path) -> None:
    """When a job fails, the process that failed is marked, and those that were stopped for it are not."""
    past = job(
        tmp_path,
        StartProcesses((*SERVERS, *WORKERS)),
        ProcessExited(SERVERS[1], -9),
        ProcessExited(WORKERS[0], -signal.SIGTERM),
        ProcessExited(WORKERS[1], -signal.SIGTERM),
        ProcessExited(SERVERS[0], 0),
        FinishJob(137),
    )
    assert overview(past, True)["badge"] == ("failed", "bad")
    assert words(past)["worker 0"] == words(past)["worker 1"] == "stopped"
    assert figure(past, "Deaths") == ["1", "", "bad"]


def test_a_silent_server_is_named(tmp_path: Path) -> None:
    """One that is stopped or cut off gives no figures, and the page says so."""
    memory = {"Resident memory": {"server 0": 1e8, "worker 0": 1e8, "worker 1": 1e8}}
    past = job(tmp_path, StartProcesses((*SERVERS, *WORKERS)), frames=[memory] * 7)
    assert overview(past, True)["badge"] == ("runs without server 1", "bad")
    [processes] = overview(past, True)["tables"]
    assert processes["rows"][1] == ["server 1", "here", "does not answer", "", "", ""]


def test_a_server_that_is_added_is_listed(tmp_path: Path) -> None:
    """It waits for its rows until the workers move, and is not taken for one that does not answer."""
    memory = {
        "Resident memory": {"server 0": 1e8, "server 1": 1e8, "worker 0": 1e8, "worker 1": 1e8}
    }
    new = StartProcesses((Member("server", 2),))
    started = StartProcesses((*SERVERS, *WORKERS))
    past = job(tmp_path, started, new, frames=[memory] * 9)
    assert overview(past, True)["badge"] == ("runs", "good")
    assert overview(past, True)["tables"][0]["rows"][2][:3] == [
        "server 2",
        "here",
        "waits for its rows",
    ]
    past = job(tmp_path, started, new, ServersMoved(3), frames=[memory] * 9)
    assert overview(past, True)["badge"] == ("runs without server 2", "bad")


def test_processes_of_a_pipeline_have_their_figures(tmp_path: Path) -> None:
    """Each stage of each worker has a seat of its own, by which its figures are named."""
    stages = tuple(Member("worker", worker, stage) for worker in (0, 1) for stage in (0, 1))
    steps = {f"worker {seat}": float(seat) for seat in range(4)}
    past = job(tmp_path, StartProcesses(stages), frames=[{"Steps per second": steps}])
    [processes] = overview(past, True)["tables"]
    assert [row[3] for row in processes["rows"]] == [f"{seat} steps/s" for seat in range(4)]
    assert processes["rows"][3][0] == "worker 1 stage 1"


def test_a_slow_worker_is_marked(tmp_path: Path) -> None:
    """In the table of processes and the badge, with how slow it is; one that has finished is marked too, and
    is no part of what others are compared with any more."""
    steps = {"Step time by worker": {"worker 0": 0.05, "worker 1": 0.4, "worker 2": 0.05}}
    workers = (*WORKERS, Member("worker", 2))
    past = job(tmp_path, StartProcesses(workers), ProcessExited(workers[2], 0), frames=[steps] * 3)
    shown = overview(past, True)
    assert shown["badge"] == ("runs, worker 1 slow", "warn")
    assert [row[2] for row in shown["tables"][0]["rows"]] == [
        "runs",
        "runs, 8.0 times slower",
        "finished",
    ]
    assert shown["tables"][0]["moods"] == ["good", "warn", ""]
    assert shown["finished"] == ["worker 2"]


def test_the_charts_have_lines(tmp_path: Path) -> None:
    """One for each death, restart, takeover and move, and for each snapshot, however often it was seen."""
    past = job(
        tmp_path,
        StartProcesses((*SERVERS, STANDBY, *WORKERS)),
        ProcessExited(SERVERS[1], -9, cause="memory ran out"),
        PromoteStandby(STANDBY, SERVERS[1], 2),
        ProcessExited(WORKERS[0], 1),
        StartProcesses((WORKERS[0],)),
        ServersMoved(1),
        frames=[{}, {}, *({"Age of the last snapshot": {"": age}} for age in (0.5, 2.5, 0.5))],
    )
    assert view_of(past, is_running=True).marks == [
        (1.0, "death", "server 1: ended with signal 9: memory ran out"),
        (2.0, "takeover", "server 1 copy 1: takes over from server 1"),
        (3.0, "death", "worker 0: ended with exit code 1"),
        (3.5, "snapshot", "snapshot"),
        (4.0, "restart", "worker 0: is started again"),
        (5.0, "move", "1 server from now on"),
        (7.5, "snapshot", "snapshot"),
    ]


def test_a_span_has_its_time_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header says how long a job runs and since when; page and tables have the launcher's time."""
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        past = job(tmp_path, frames=[{}] * 2)
        past.heading["began"] = 1795830832.0
        past.frames[-1]["at"] = 1795830832.0 + 45
        assert state(past, True) == "Running for 45 s (since 07:23:52 IST)"
        past.add(JobEvent(past.frames[-1]["at"] + 3600 * 24, "finished", code=0))
        assert state(past, True) == (
            "Ended with exit code 0 after 24.0 h (2026-11-28, 07:23:52 to 2026-11-29 07:24:37 IST)"
        )
        assert zone(0.0) == (19800.0, "IST")
    finally:
        monkeypatch.undo()
        time.tzset()


def test_the_summary_of_a_finished_job(tmp_path: Path) -> None:
    """The last known loss and metrics, samples, the time and the faults."""
    frames = [
        {"Loss": {"worker 0": 0.5, "worker 1": 0.25}, "Samples": {"": 6400.0}},
        {"Loss": {"worker 0": 0.25}, "Logged values": {"auc worker 0": 0.75, "auc worker 1": 0.8}},
    ]
    past = job(tmp_path, StartProcesses((*SERVERS, *WORKERS)), FinishJob(0), frames=frames)
    assert overview(past, False)["badge"] == ("finished", "good")
    assert figure(past, "Final loss", False) == ["0.25", "mean of 2 workers", ""]
    assert figure(past, "Samples", False)[0] == "6,400"
    assert figure(past, "auc", False)[0] == "0.775"
    assert figure(past, "Deaths", False) == ["0", "", ""]


def test_the_first_nan_is_named(tmp_path: Path) -> None:
    """With its worker, among the figures and the faults."""
    message = Said(SERVERS[0], f"{FIRST_NONFINITE}worker 1, step 37: the loss is nan")
    past = job(tmp_path, message, frames=[{"Steps with NaN or infinity": {"worker 1": 12.0}}])
    assert figure(past, "Steps with NaN") == ["12", "worker 1, step 37: the loss is nan", "bad"]
    _, faults = overview(past, True)["tables"]
    assert faults["rows"][0][1:] == ["worker 1", "first NaN or infinity: step 37: the loss is nan"]


@pytest.mark.parametrize(("frames", "expected"), [(151, [(300.0, None)]), (150, []), (0, [])])
def test_an_alert_is_in_force_after_its_time(
    tmp_path: Path, frames: int, expected: list[tuple[float, float | None]]
) -> None:
    """As docs/alerts.yml has it: no pushes for 5 minutes."""
    pushes = {"Pushes per second by server": {"server 0": 0.0, "server 1": 9.5}}
    actual = [*fired_alerts(job(tmp_path, frames=[pushes] * frames))]
    assert [(one.since, one.until) for one in actual] == expected
    assert all((one.name, one.series) == ("PsfleetNoProgress", "server 0") for one in actual)


def test_an_alert_ends(tmp_path: Path) -> None:
    """When its condition does; a report still names it."""
    full, free = ({"Waiting calls": {"server 1": share}} for share in (0.95, 0.5))
    past = job(tmp_path, frames=[free, *[full] * 40, free, free])
    [alert] = fired_alerts(past)
    assert (alert.name, alert.since, alert.until) == ("PsfleetCallsNearLimit", 62.0, 82.0)
    assert overview(past, True)["tables"] == []
    [table] = overview(past, False)["tables"]
    assert table["rows"][0][1:] == ["PsfleetCallsNearLimit", "Waiting calls > 0.9 (server 1)"]


@pytest.mark.long
def test_a_browser_shows_the_first_screen(tmp_path: Path) -> None:
    """A loss that is NaN turns red, and the curve of what was before stays, with axes and a legend that names
    the worker. Cards with nothing, or nothing but 0, are named in a line; on a phone sections are closed."""
    losses: list[Any] = [{"Loss": {"worker 0": 1 / n, "worker 1": 2 / n}} for n in range(1, 30)]
    losses += [{"Loss": {"worker 0": None, "worker 1": 0.1}}] * 500
    loss = job(tmp_path, StartProcesses(WORKERS), frames=losses)
    series = {panel.title: {"worker 0": 1.0, "server 1": 2.0} for panel in PANELS}
    del series["Rows"]
    series["Logged values"] = {"AUC worker 0": 0.5}
    series["Torn steps"] = {"": 0.0}
    folded = job(tmp_path, StartProcesses((*SERVERS, *WORKERS)), frames=[series] * 9)
    logged = {
        f"{LONG} worker 0": 123_456.789,
        "AUC worker 0": 0.75,
        "a log loss worker 0": 0.5,
        "a log loss worker 1": 0.25,
    }
    curves: list[Any] = [{}, {"Time left": {"": 5000.0}}, {"Logged values": logged}, {}]
    curves += [{"Age of the last snapshot": {"": 7.0}, "Time left": {"": 100.0}}]
    drawn = job(tmp_path, StartProcesses(WORKERS), ProcessExited(WORKERS[1], 1), frames=curves)
    page = tmp_path / "report.html"
    with browser() as opened:
        page.write_text(job_report(loss))
        check_loss(opened(page.as_uri(), viewport={"width": 1280, "height": 800}))
        page.write_text(job_report(folded, is_running=True))
        check_folded(opened(page.as_uri(), viewport=PHONE))
        page.write_text(job_report(drawn))
        check_drawn(opened(page.as_uri(), viewport={"width": 1280, "height": 800}))


def check_loss(shown: Any) -> None:
    """What the page of a job says whose loss is NaN."""
    card = '.panel[data-title="Loss"]'
    assert "bad" in shown.get_attribute(card, "class")
    legend = shown.eval_on_selector_all(f"{card} li", "all => all.map(one => one.textContent)")
    assert legend == ["worker 0: NaN", "worker 1: 0.1"]
    chart = 'panels.find(one => one.title === "Loss").chart'
    [times, first, _] = shown.evaluate(f"{chart}.plot.data")
    assert (len(times), first[28], first[29:]) == (529, 1 / 29, [None] * 500)
    assert shown.evaluate(f"{chart}.spoilt") == [[58, 2 * 528, 528]]
    assert "NaN" in shown.text_content('.figure.bad[data-title="Final loss"]')
    shown.hover(f"{card} .u-over", position={"x": 2, "y": 40})
    tip = shown.text_content(f"{card} .tip")
    assert re.fullmatch(r"\d\d:\d\d:\d\dworker 0: [\d.]+worker 1: [\d.]+", tip)


LONG = "a rather long name of a quantity that somebody wants to see"


def check_drawn(shown: Any) -> None:
    """What the page draws: a chart for each logged name, points without neighbours, lines for what has
    happened, round ticks of time; and numbers as the terminal writes them."""
    cards = ".panel:not([hidden])"
    titles = shown.eval_on_selector_all(cards, "all => all.map(one => one.dataset.title)")
    assert {"AUC", "a log loss"} <= {*titles}
    assert "Logged values" not in titles
    legend = "all => all.map(one => one.textContent)"
    named = shown.eval_on_selector_all('.panel[data-title="a log loss"] li', legend)
    assert named == ["worker 0: 0.5", "worker 1: 0.25"]
    assert shown.evaluate("[alone([, 1, , null, 2, 3]), alone([4]), alone([1, , 2])]") == [
        [1],
        [0],
        [],
    ]
    chart = 'panels.find(one => one.title === "%s").chart'
    assert shown.evaluate(chart % "AUC" + ".shown.map(one => one[1])") == ["death", "snapshot"]
    ticks = shown.evaluate(chart % "Time left" + ".plot.axes[1]._splits.map(FORMATS.s)")
    assert ticks == ["0 s", "30.0 min", "60.0 min"] or ticks[1] in ("10.0 min", "20.0 min"), ticks
    assert "death" in shown.text_content(".key")
    assert shown.text_content(f'.figure[data-title="{LONG}"] b') == "123.5 k"
    wide = "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.textContent)"
    assert shown.eval_on_selector_all(".figure, .figure b", wide) == []
    for unit in {panel.unit for panel in PANELS}:
        texts = shown.evaluate("([unit, all]) => all.map(FORMATS[unit])", [unit, NUMBERS])
        assert texts == [number_text(value, unit) for value in NUMBERS], unit


NUMBERS = [
    *(0, 1, 0.5, 1 / 3, 45, 999.4, 999.96, 13_500, 1e6, 123_456.789, 2.5e9, 3e15, 7e-5, 1.234e-7),
    *(119.9, 7300, 5e5),
]


def check_folded(shown: Any) -> None:
    """What the page says of a job that lacks one figure and has another that is always 0."""
    hidden = "all => all.filter(one => one.hidden).map(one => one.dataset.title)"
    assert shown.eval_on_selector_all(".panel", hidden) == ["Logged values", "Rows", "Torn steps"]
    named = shown.eval_on_selector_all(".without", "all => all.map(one => one.textContent)")
    assert {*filter(None, named)} == {"Not in this job: Rows", "Always 0 so far: Torn steps"}
    assert shown.evaluate("document.documentElement.scrollHeight") <= 3000
    assert shown.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    shown.click('summary h2:text-is("Memory")')
    assert shown.is_visible('.panel[data-title="Resident memory"] canvas')


def test_the_chart_library_is_that_of_npm() -> None:
    """uPlot 1.6.32 as its authors have published it, with its licence in every page."""
    folder = files("psfleet_launch.observability")
    digest = hashlib.sha256(folder.joinpath("uplot.min.js").read_bytes()).hexdigest()
    assert digest == "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    page = dashboard_page()
    assert folder.joinpath("uplot-licence.txt").read_text() in page
    assert "/* uplot" not in page
    assert "/* dashboard" not in page
