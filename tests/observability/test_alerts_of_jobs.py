"""Each alert fires in Prometheus when a real job has what it is about.

The rules are those of docs/alerts.yml but for their times: a condition need not last, and rates are taken
over 10 s. One job has most of the troubles, one after the other; a second one has more workers. In `make
test` the rules judge made-up series (test_alerts.py), and a job has all that they ask (test_watched_job.py).
"""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from psfleet.core.base.files import exchange
from psfleet.core.base.panels.process_panels import PANELS
from psfleet.core.engine.runtime_interface import Runtime
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_launch.chaos.audit import ChaosSettings
from psfleet_launch.job.job_plan import Job
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.observability.fleet_reader import FleetReader
from psfleet_launch.observability.job_history import JobHistory, heading
from psfleet_launch.observability.watch_port import WatchPort
from tests.launch.conftest import ROOT
from tests.observability.prometheus import Prometheus, scraping
from tests.observability.troubled_trainer import ROW
from tests.observability.watched import Watched, training
from tests.waiting import until

SEATS = 12
"""Of them 11 wait for one, which is more than 0.9."""

_OPTIONS = (
    *("--servers", "2", "--workers", "2", "--replicas", "1", "--restart-workers", "1"),
    *("--snapshot-every", "1s", "--server-memory", "384M", "--on-nan", "skip"),
    *("--hung-after", "0"),
)
_STOPPED_STANDBYS = "receive:1:stop"  # at the first record of their copy


def short_rules(folder: Path) -> Path:
    """The shipped rules with shorter times."""
    shipped = (ROOT / "docs/alerts.yml").read_text()
    shorter, held = re.subn(r"for: \d+m", "for: 0s", shipped)
    shorter, rates = re.subn(r"\[1m\]", "[10s]", shorter)
    assert held == sum(panel.alert is not None for panel in PANELS)
    assert rates > 0
    rules = folder / "alerts.yml"
    rules.write_text(shorter)
    return rules


@contextlib.contextmanager
def crowded(folder: Path) -> Iterator[str]:
    """The port of a fleet whose server may let no more calls wait than it has workers."""
    with LocalFleet(1, SEATS, limits=f"waiting_calls={SEATS}", in_process=True) as fleet:
        job = Job(JobRequest(script=__file__, port=0), "crowded", "token", folder, folder)
        reader = FleetReader("crowded", fleet.endpoints, fleet.environment(0))
        history = JobHistory(folder, heading(job, "local", "0.1", {}))
        history.close()
        port = WatchPort("0", job, reader, history)
        port.open()
        found: list[Runtime] = []
        threads = [
            threading.Thread(target=lambda seat=seat: found.append(fleet.connect(seat, "async")))
            for seat in range(SEATS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        last, *others = found
        waiting = [threading.Thread(target=one.barrier) for one in others]
        for thread in waiting:
            thread.start()
        try:
            yield port.url
        finally:
            last.barrier()
            for thread in waiting:
                thread.join()
            for one in found:
                one.close()
            port.close()
            reader.close()


class Conditions:
    """Causes conditions in a job and waits for their alerts."""

    def __init__(self, job: Watched, prometheus: Prometheus, folder: Path) -> None:
        self._job = job
        self._prometheus = prometheus
        self._folder = folder
        self.fired: set[str] = set()

    def fires(self, name: str, **labels: str) -> None:
        """Wait for an alert."""

        def found() -> bool:
            assert self._job.launcher.process.poll() is None, self._job.launcher.log("*")
            alerts = self._prometheus.alerts().get(name, [])
            return any(labels.items() <= one.items() for one in alerts)

        until(found, lambda: f"no {name} of {labels}: {self._prometheus.alerts()}", every=0.3)
        self.fired.add(name)

    def fires_none_of(self, *names: str) -> None:
        """These alerts do not fire yet."""
        assert not {f"Psfleet{name}" for name in names} & self._prometheus.alerts().keys()

    def await_standbys(self) -> None:
        """Return once both servers collect records for a standby."""
        until(lambda: self._job.value("psfleet_standby_attached") == 2, "standbys")

    def order(self, what: str, text: str = "") -> None:
        """Let worker 0 do something."""
        (self._folder / "written").write_text(text)
        (self._folder / "written").rename(self._folder / what)

    def signal(self, role: str, rank: int, number: int) -> None:
        """Send a process of the job a signal."""
        os.kill(self._job.launcher.pid_of(role, rank), number)

    def break_snapshots(self) -> None:
        """A file is where the folder of snapshots was."""
        until(lambda: self._job.value("psfleet_snapshot_bytes") > 0, "snapshot")
        snapshots = self._folder / "psfleet-logs/troubled/snapshots"
        (self._folder / "away").touch()
        assert exchange(snapshots, self._folder / "away")

    def rows_for(self, share: float) -> str:
        """How many rows fill this share of the memory of both servers."""
        limit = self._job.value("psfleet_memory_limit_bytes")
        return str(int((share * limit - self._job.value("psfleet_memory_used_bytes")) / ROW))

    def wake(self) -> None:
        """Let stopped processes go on."""
        for pid in self._job.launcher.family():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.kill(pid, signal.SIGCONT)


@pytest.mark.skipif("PSFLEET_TORTURE" not in os.environ, reason="make torture runs this test")
def test_every_alert_fires_when_a_job_has_its_condition(tmp_path: Path) -> None:
    """Calls wait, answers are lost, a standby hangs, snapshots fail, memory fills, workers stop and die."""
    folder = tmp_path / "job"
    (folder / "chaos").mkdir(parents=True)
    lossy = ChaosSettings(str(folder / "chaos"), seed=1, drop=0.5).text()
    with (
        crowded(tmp_path) as other,
        training(
            folder,
            "troubled",
            *_OPTIONS,
            script="troubled_trainer.py",
            PSFLEET_CHAOS=lossy,
            PSFLEET_CRASH=_STOPPED_STANDBYS,
        ) as job,
        scraping(tmp_path, short_rules(tmp_path), other, job.url) as prometheus,
    ):
        found = Conditions(job, prometheus, folder)
        try:
            cause_all(found)
        finally:
            found.wake()
    assert found.fired == {panel.alert.name for panel in PANELS if panel.alert}


def cause_all(found: Conditions) -> None:
    """Cause one condition after the other; those that last fire until the end."""
    found.fires("PsfleetCallsNearLimit", job="crowded", rank="0")
    found.fires("PsfleetStandbyMissing", job="troubled", rank="0")
    found.fires("PsfleetStandbyMissing", job="troubled", rank="1")
    found.fires("PsfleetManyRetries", job="troubled")
    found.fires("PsfleetSkewedServers", job="troubled")
    found.fires_none_of("NonFinite", "MemoryShort", "StandbyBehind", "ProcessDied")

    found.await_standbys()
    found.order("fill", found.rows_for(0.95))
    found.order("nan")
    found.order("large")
    found.break_snapshots()
    found.fires("PsfleetNonFinite", job="troubled", rank="0")
    found.fires("PsfleetStandbyBehind", job="troubled")
    found.fires("PsfleetMemoryShort", job="troubled")
    found.fires("PsfleetSnapshotOverdue", job="troubled")

    for worker in (0, 1):
        found.signal("worker", worker, signal.SIGSTOP)
    found.fires("PsfleetNoProgress", job="troubled")
    found.signal("worker", 0, signal.SIGCONT)
    found.signal("worker", 1, signal.SIGKILL)
    found.fires("PsfleetProcessDied", job="troubled", role="worker", rank="1")
