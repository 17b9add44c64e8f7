"""Real jobs that are watched: they train until they are told to stop."""

import contextlib
import re
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psfleet.core.base.observability.exposition import decode
from psfleet.core.base.panels.panel import Level, Look
from psfleet.core.base.panels.process_panels import PANELS
from psfleet_launch.observability.fleet_reader import look_at, replies
from tests.launch.conftest import ROOT, Launcher, _environment
from tests.waiting import until

MOVES = (
    *("cpu_seconds", "resident_bytes", "snapshot", "log_", "connections", "standby_lag", "queued"),
    "ssp_",
)
"""In names of metrics that do not rest while the training does, or of modes that this job has not."""

STILL = {
    panel.title
    for panel in PANELS
    if isinstance(panel.query, Level) and not any(part in panel.query.metric for part in MOVES)
}
"""Panels that only tell a level, which rests while the training does."""


@dataclass
class Watched:
    """A running job and where it is watched."""

    launcher: Launcher
    url: str

    def get(self, path: str) -> bytes:
        """What the launcher answers."""
        with urllib.request.urlopen(self.url + path, timeout=60) as reply:
            content: bytes = reply.read()
            return content

    def look(self) -> Look:
        """The job's metrics now."""
        return look_at(list(decode(self.get("metrics"))))

    def value(self, name: str, **labels: str) -> float:
        """The sum of these samples."""
        return sum(value for _, value in self.look().select(name, labels))


@contextlib.contextmanager
def training(
    folder: Path, name: str, *options: str, script: str = "trainer.py", **variables: str
) -> Iterator[Watched]:
    """A job in this folder, which ends well and leaves nothing.

    A file `hold` in the folder lets the workers of trainer.py rest.
    """
    mark, said = uuid.uuid4().hex, folder / "screen"
    words = [*options, "--watch", "0", "--job", name, "--no-progress"]
    with open(said, "w") as screen:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "psfleet_launch", *words),
                ROOT / "tests/observability" / script,
            ],
            cwd=folder,
            text=True,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            env=_environment() | {"PSFLEET_TEST": mark} | variables,
        )
    launcher = Launcher(process, folder, mark)

    def url() -> str:
        assert process.poll() is None, said.read_text()
        match = re.search(r"watch +(http\S+)", said.read_text())
        return match[1] if match else ""

    try:
        until(url, "address on the screen")
        yield Watched(launcher, url())
        (folder / "hold").unlink(missing_ok=True)
        (folder / "stop").touch()
        assert process.wait(120) == 0, said.read_text()
        report = (folder / f"psfleet-logs/{name}/report.html").read_text()
        assert '"state":"Ended with exit code 0 after ' in report
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        assert not launcher.family()


def shown(page: Any) -> dict[str, dict[str, float]]:
    """Figures in the DOM of STILL panels and of what is logged, by title and series."""
    said = page.evaluate(
        """[...document.querySelectorAll(".panel")].map(panel => [panel.dataset.title,
           [...panel.querySelectorAll("li[data-name]")].map(
               one => [one.dataset.name, +one.dataset.value])])"""
    )
    others = {panel.title for panel in PANELS} - STILL | {"Logged values"}
    return {title: dict(values) for title, values in said if title not in others}


def charts(figures: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Figures by panel as the page shows them: each name that is logged has a chart."""
    made = {title: values for title, values in figures.items() if title != "Logged values"}
    for key, value in figures.get("Logged values", {}).items():
        name, _, rank = key.rpartition(" worker ")
        made.setdefault(name, {})[f"worker {rank}"] = value
    return made


def expected(job: Watched) -> dict[str, dict[str, float]]:
    """The same as /metrics has them now."""
    look = job.look()
    panels = zip(PANELS, replies(look, look)["panels"], strict=True)
    return charts({panel.title: values for panel, values in panels if panel.title in STILL})
