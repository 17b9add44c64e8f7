"""A real job of 2 servers and 2 workers, watched by a real Prometheus."""

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psfleet.core.base.panels.panel import Look, Panel
from psfleet.core.base.panels.process_panels import PANELS
from psfleet_launch.observability.fleet_reader import replies
from psfleet_launch.observability.job_history import read_history
from psfleet_launch.observability.page_and_report import dashboard_page, job_report, slow_processes
from tests.launch.conftest import ROOT
from tests.observability.browser import CELLS, browser, program
from tests.observability.event_files import scalars
from tests.observability.prometheus import Prometheus, scraping
from tests.observability.trainer import ID, STEP, WORKER
from tests.observability.watched import MOVES, STILL, Watched, charts, expected, shown, training
from tests.waiting import until

_OPTIONS = (
    *("--servers", "2", "--workers", "2", "--tcp", "--replicas", "1"),
    *("--hung-after", "0"),
    *("--durability", "log+fsync", "--snapshot-every", "2s", "--server-memory", "2G"),
    *("--server-disk", "rows"),
    *("--on-nan", "skip", "--tensorboard", "events"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the job runs."""
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def job(folder: Path) -> Iterator[Watched]:
    """The job, in training; every worker has made the step with the NaN."""
    with training(folder, "watched", *_OPTIONS) as watched:
        until(
            lambda: (
                watched.value("psfleet_pushes_total", rank="0") > 4 * STEP
                and watched.value("psfleet_nonfinite_pushes_total") == 1
            ),
            lambda: f"training: {watched.launcher.log('*')}",
            every=0.2,
        )
        yield watched


@pytest.fixture(scope="module")
def prometheus(job: Watched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It watches the job."""
    folder = tmp_path_factory.mktemp("prometheus")
    with scraping(folder, ROOT / "docs/alerts.yml", job.url) as prometheus_server:
        yield prometheus_server


@pytest.mark.long
def test_every_panel_has_a_reply(job: Watched, prometheus: Prometheus) -> None:
    """Each query of a panel returns series from a job in training, also those of Grafana and alerts."""
    missing = list(PANELS)

    def all_reply() -> bool:
        missing[:] = [panel for panel in missing if not prometheus.ask(panel.query.promql())]
        return not missing

    until(all_reply, lambda: f"answers to {[panel.title for panel in missing]}", every=0.3)
    for panel in PANELS:
        assert prometheus.ask(panel.query.promql('job="watched"')), panel.title
        [labels, *_] = prometheus.ask(panel.query.promql(per_job=True))
        assert dict(labels)["job"] == "watched", panel.title
        assert not prometheus.ask(panel.query.promql('job="another"')), panel.title


def test_the_page_and_prometheus_agree(job: Watched, prometheus: Prometheus, folder: Path) -> None:
    """While the training rests, Prometheus has every counter as /metrics and the page show it."""
    (folder / "hold").touch()
    rests = {name for panel in PANELS for name in panel.query.metrics}
    rests = {name for name in rests if not any(part in name for part in MOVES)}
    different: list[Any] = []

    def same() -> bool:
        look = job.look()
        different[:] = _differences(look, prometheus, rests)
        return not different

    until(same, lambda: f"agreement: {different}", every=0.3)
    (folder / "hold").unlink()


def _differences(look: Look, prometheus: Prometheus, rests: set[str]) -> list[Any]:
    """What Prometheus knows otherwise: of every metric, and of every panel that tells a level."""
    differences: list[Any] = []
    for name in rests:
        shown = {frozenset(labels.items()): value for labels, value in look.select(name, {})}
        differences += [name] if shown != prometheus.ask(name) else []
    for panel, shown in zip(PANELS, replies(look, look)["panels"], strict=True):
        if panel.title in STILL:
            scraped = _by_series(panel, prometheus.ask(panel.query.promql()))
            differences += [(panel.title, shown, scraped)] if shown != scraped else []
    return differences


def _by_series(panel: Panel, values: dict[frozenset[tuple[str, str]], float]) -> dict[str, float]:
    return {
        " ".join(dict(labels).get(name, "") for name in panel.query.by): value
        for labels, value in values.items()
    }


def test_the_rules_and_the_metrics_are_valid(job: Watched) -> None:
    """promtool accepts the alert rules, and what /metrics gives."""
    promtool = program("promtool", "prometheus")
    rules = [promtool, "check", "rules", str(ROOT / "docs/alerts.yml")]
    assert subprocess.run(rules, capture_output=True, check=False).returncode == 0
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=job.get("metrics"), capture_output=True, check=False
    )
    assert checked.returncode in (0, 3), checked.stderr  # 3: it would name some otherwise


def test_the_first_nan_is_named(job: Watched, folder: Path) -> None:
    """The log of the worker, the screen and the history name the planted NaN with worker, step, table and id;
    the fleet counts one. (Which of several workers: test_norms.py.)"""
    sentence = f"worker {WORKER}, step {STEP}: the gradient for table 'users' has nan for id {ID};"
    assert sentence in job.launcher.log(f"workerlog.{WORKER}")
    assert job.value("psfleet_nonfinite_pushes_total", role="worker", rank=str(WORKER)) == 1
    assert job.value("psfleet_nonfinite_pushes_total", role="worker", rank="0") == 0
    first = f"first NaN or infinity: {sentence[:-1]}"
    until(lambda: f"server 0: {first}\n" in (folder / "screen").read_text(), "word on the screen")
    said = [one.text for one in read_history(folder / "psfleet-logs" / "watched").events]
    assert said.count(first) == 1


def test_logged_values_are_shown_and_kept(job: Watched, folder: Path) -> None:
    """What workers log is a metric; TensorBoard gets every value, and the figures of the job beside it."""
    (folder / "hold").touch()

    def shown() -> dict[int, float]:
        return {
            int(labels["rank"]): value
            for labels, value in job.look().select("psfleet_logged", {"name": "steps made"})
        }

    def kept() -> dict[int, list[tuple[str, int, float]]]:
        return {worker: scalars(folder / f"events/watched/worker.{worker}") for worker in (0, 1)}

    until(lambda: shown() == {rank: curve[-1][2] for rank, curve in kept().items()}, every=0.2)
    for curve in kept().values():
        assert curve == [("steps made", step, step) for step in range(1, len(curve) + 1)]
    (folder / "hold").unlink()
    until(lambda: "Loss/worker 0" in {tag for tag, _, _ in scalars(folder / "events/watched/job")})


def test_events_bring_the_panels_and_their_figures(job: Watched) -> None:
    """/events begins with what the panels are; then come overviews and figures, which are those of a look."""
    with urllib.request.urlopen(job.url + "events", timeout=60) as stream:
        name, heading = _event(stream)
        assert (name, heading["job"]) == ("panels", "watched")
        assert [one["title"] for one in heading["panels"]] == [panel.title for panel in PANELS]
        frames: list[Any] = []
        while not frames:
            name, overview = _event(stream)
            assert name == "overview"
            assert overview["state"].startswith("Running for ")
            name, frames = _event(stream)
            assert name == "frames"
    up = next(n for n, panel in enumerate(PANELS) if panel.title == "Processes")
    assert frames[-1]["panels"][up] == {"server": 2, "worker": 2, "standby": 2}


def _event(stream: Any) -> tuple[str, Any]:
    name = stream.readline().decode().removeprefix("event: ").strip()
    data = json.loads(stream.readline().decode().removeprefix("data: "))
    assert stream.readline() == b"\n"
    return name, data


@pytest.mark.long
def test_a_browser_shows_the_figures_and_the_report(job: Watched, folder: Path) -> None:
    """On a phone, in the dark: the page shows what /metrics says, fits, and loads nothing from elsewhere. The
    figures of the report are the last ones of the job's history; /report has them too."""
    logs = folder / "psfleet-logs" / "watched"
    phone = {"width": 390, "height": 844}
    with browser() as opened:
        (folder / "hold").touch()
        page = opened(job.url, viewport=phone, color_scheme="dark")
        until(
            lambda: shown(page) == expected(job),
            lambda: f"{shown(page)} {expected(job)}",
            every=0.2,
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= phone["width"]
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == "rgb(17, 20, 24)"
        (folder / "hold").unlink()
        page.close()
        until(
            lambda: read_history(logs).last("Loss").keys() == {"worker 0", "worker 1"},
            "figures of both workers",
        )
        (folder / "report.html").write_text(job_report(past := read_history(logs), is_running=True))
        page = opened((folder / "report.html").as_uri())
        assert shown(page) == charts({title: dict(past.last(title)) for title in STILL})
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        assert page.text_content("#state").startswith("Running for ")
        facts = dict(page.evaluate(CELLS, "The job"))
        assert (facts["Servers"], facts["Workers"], facts["Network"]) == ("2", "2", "TLS")
        assert [row[0] for row in page.evaluate(CELLS, "Speed of processes")[1:]] == [
            row[0] for row in slow_processes(past)
        ]
        assert opened(job.url + "report").text_content("#state").startswith("Running for ")


def test_only_loopback_may_look(job: Watched) -> None:
    """A request under another name is refused; an unknown path is told which there are."""
    stranger = urllib.request.Request(job.url + "metrics", headers={"Host": "evil.example:80"})
    for request, code in ((stranger, 403), (job.url + "secrets", 404)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        assert refused.value.code == code
        refused.value.close()
    for name in ("127.0.0.1", "localhost", "[::1]", "LOCALHOST:80"):
        known = urllib.request.Request(job.url + "sd", headers={"Host": name})
        with urllib.request.urlopen(known, timeout=60) as reply:
            assert reply.status == 200, name
    assert json.loads(job.get("sd"))[0]["targets"] == [job.url.split("/")[2]]


def test_panels_have_names_of_their_own() -> None:
    """No two panels or alerts have the same name, and each unit is one that the page can show."""
    titles = [panel.title for panel in PANELS]
    alerts = [panel.alert.name for panel in PANELS if panel.alert]
    assert len(set(titles)) == len(titles)
    assert len(set(alerts)) == len(alerts)
    page = dashboard_page()
    assert all(f"  {panel.unit}:" in page for panel in PANELS)
    assert not re.search(r"(src|href)=\"https?:", page)
