"""The page of a job that loses a server, and the report of the job afterwards, in a real browser."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from psfleet_launch.observability.job_history import read_history
from tests.observability.browser import CELLS, browser
from tests.observability.watched import STILL, charts, expected, shown, training
from tests.waiting import until

pytestmark = pytest.mark.long

DIES = 1
OPTIONS = (*("--servers", "2", "--workers", "1", "--replicas", "1"), *("--hung-after", "0"))


def test_the_page_shows_the_death_and_the_recovery(tmp_path: Path) -> None:
    """Its figures go on being those of /metrics; the report names the death and has the last figures."""
    own = {"role": "server", "rank": str(DIES)}
    with browser() as opened:
        with training(tmp_path, "killed", *OPTIONS) as job:

            def value(name: str) -> float:
                return job.value(f"psfleet_{name}", **own)

            until(lambda: value("standby_attached") == 1, "a standby", every=0.2)
            until(lambda: value("pushes_total") > 20, "pushes", every=0.2)
            os.kill(job.launcher.pid_of("server", DIES), signal.SIGKILL)
            until(lambda: value("takeover_seconds_count") == 1, job.launcher.family, every=0.2)
            page = opened(job.url)
            until(lambda: value("pushes_total") > 0, "the standby in the place of its server")
            before = value("pushes_total")
            until(lambda: value("pushes_total") > before, "pushes after the takeover")
            (tmp_path / "hold").touch()
            until(
                lambda: shown(page) == expected(job),
                lambda: f"{shown(page)} {expected(job)}",
                every=0.2,
            )
            check_page(page)
            page.close()
        logs = tmp_path / "psfleet-logs" / "killed"
        page = opened((logs / "report.html").as_uri())
        assert page.text_content("#state").startswith("Ended with exit code 0")
        past = read_history(logs)
        assert shown(page) == charts({title: dict(past.last(title)) for title in STILL})
        rows = [row[1:] for row in page.evaluate(CELLS, "Faults")[1:]]
        died = [what for who, what in rows if who == f"server {DIES}"]
        assert died == ["ended with signal 9"]
        assert any(what.startswith(f"has the place of server {DIES} ") for _, what in rows)


def check_page(page: Any) -> None:
    """What the page of the running job says."""
    figures = shown(page)
    assert figures["Deaths"][f"server {DIES}"] == sum(figures["Deaths"].values()) == 1
    assert figures["Takeovers"] == {"server 0": 0, "server 1": 1}
    assert figures["Time of takeovers"][f"server {DIES}"] > 0
    assert figures["Processes"]["server"] == 2
    table = {row[0]: row[2] for row in page.evaluate(CELLS, "Processes")[1:]}
    assert table[f"server {DIES} copy 1"] == f"in place of server {DIES}"
    assert f"server {DIES}" not in table
    assert [row[1:] for row in page.evaluate(CELLS, "Alerts in force")[1:]] == [
        ["PsfleetProcessDied", f"Deaths > 0 (server {DIES})"]
    ]
    assert page.text_content("#badge") == "runs, 1 alert"
    assert page.text_content('.figure[data-title="Deaths"]') == "Deaths11 takeover"
    faults = [row[1:] for row in page.evaluate(CELLS, "Faults")[1:]]
    assert [f"server {DIES}", "ended with signal 9"] in faults
