"""A process or a network that is silent for a while: workers wait, and every push counts once.

PSFLEET_TORTURE tries silences of up to 100 seconds; docs/recovery.md promises 120.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from psfleet.core.base.job_files import read_ready
from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.agents.machines import NETWORK, Lab, has, laboratory, run
from tests.programs import PYTHONPATH
from tests.trainings import zero_rows
from tests.waiting import pause, until

ROWS = zero_rows("rows", 2)
IDS = np.arange(6)
SCRIPT = Path(__file__).with_name("scripts") / "stepping.py"

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
]  # the longest silence, and what both ends need to meet again
long = pytest.mark.skipif(
    not os.environ.get("PSFLEET_TORTURE"), reason="silences take minutes: make torture has them"
)
SECONDS = pytest.mark.parametrize("seconds", [10, 30, 60, 100])


@pytest.mark.parametrize(
    ("network", "mode", "durability"),  # any two of them in every way
    [
        ("unix", "async", "none"),
        ("unix", "sync", "log"),
        ("tcp", "async", "log"),
        ("tcp", "sync", "none"),
    ],
)
def test_a_silent_server_is_waited_for(
    network: Literal["unix", "tcp"], mode: Literal["async", "sync"], durability: str
) -> None:
    """Nothing ends a push to a stopped server before its own deadline; it counts once when the server goes
    on."""
    with LocalFleet(2, 1, network, durability=durability) as fleet:
        runtime = ClusterRuntime(fleet.environment(0), mode)
        runtime.create(ROWS)
        for step in (1, 2):
            pause(fleet.processes[1])
            resuming = threading.Timer(3.0, fleet.processes[1].send_signal, [signal.SIGCONT])
            resuming.start()
            runtime.push([Gradient(ROWS.key, np.ones((6, 2), np.float32), IDS, 1.0)])
            assert runtime.pull([Read(ROWS.key, IDS)])[0].tolist() == [[-step, -step]] * 6
            resuming.join()
        runtime.close()


@dataclass
class _Job:
    """Two servers with logs, and a worker that steps until `end`."""

    folder: Path
    servers: "Sequence[subprocess.Popen[bytes]]"
    worker: "subprocess.Popen[bytes]"

    @property
    def printed(self) -> list[str]:
        """Lines of the worker."""
        return (self.folder / "worker").read_text().splitlines()

    def goes_on(self) -> None:
        """Return when the worker has made some steps more."""
        before = len(self.printed)
        until(lambda: len(self.printed) > before + 5 or self.worker.poll() is not None)
        assert self.worker.poll() is None, (self.folder / "worker").read_text()

    def end(self) -> None:
        """Let the worker end; every push has counted once."""
        (self.folder / "over").touch()
        assert self.worker.wait(120) == 0, (self.folder / "worker").read_text()
        _, expected, *rows = self.printed[-1].split()
        assert rows == [f"{float(expected)}"]

    def ports(self, server: int) -> list[int]:
        """Where it listens: for control, and for tensors."""
        endpoint = read_ready(self.folder / f"ready.{server}")[0]
        return [int(address.rpartition(":")[2]) for address in addresses_of(endpoint)]


@contextlib.contextmanager
def job(
    folder: Path,
    endpoint: Callable[[int], str],
    within: Callable[[str], Sequence[str]] = lambda role: (),
) -> Iterator[_Job]:
    """Start it, and end it by force.

    Args:
        folder: For its files.
        endpoint: At which a server is to listen.
        within: What the command of a server or worker begins with.
    """
    asked = [endpoint(server) for server in range(2)]
    common = {
        **os.environ,
        "PYTHONPATH": PYTHONPATH,
        "PSFLEET_INSECURE": "1",
        "PSFLEET_WORKERS": "1",
        "PSFLEET_DURABILITY": "log",
        "PSFLEET_LOG_FOLDER": str(folder),
    }
    with contextlib.ExitStack() as stack:

        def start(name: str, *command: str, **more: str) -> "subprocess.Popen[bytes]":
            role = name.partition(".")[0]
            with (folder / name).open("wb") as log:
                began = subprocess.Popen(
                    [*within(role), sys.executable, *command],
                    env={**common, "PSFLEET_ROLE": role, **more},
                    stdout=log,
                    stderr=log,
                )
            stack.callback(began.wait)
            stack.callback(began.kill)
            return began

        servers = [
            start(
                f"server.{server}",
                *("-m", "psfleet_server", "--index", str(server), "--servers", ",".join(asked)),
                *("--ready-file", str(folder / f"ready.{server}")),
            )
            for server in range(2)
        ]
        until(lambda: all((folder / f"ready.{server}").exists() for server in range(2)))
        endpoints = ",".join(read_ready(folder / f"ready.{server}")[0] for server in range(2))
        worker = start(
            "worker", str(SCRIPT), str(folder / "over"), PSFLEET_SERVERS=endpoints, PSFLEET_RANK="0"
        )
        yield _Job(folder, servers, worker)


@long
@SECONDS
@pytest.mark.parametrize("end", ["server", "worker"])
@pytest.mark.parametrize("network", ["unix", "tcp"])
def test_a_process_may_stop(tmp_path: Path, network: str, end: str, seconds: int) -> None:
    """Server 1, or the worker."""
    path = "127.0.0.1:0" if network == "tcp" else f"unix:{tmp_path}/sock."
    with job(tmp_path, lambda i: path if network == "tcp" else f"{path}{i}") as one:
        one.goes_on()
        stopped = one.servers[1] if end == "server" else one.worker
        pause(stopped)
        time.sleep(seconds)
        stopped.send_signal(signal.SIGCONT)
        one.goes_on()
        one.end()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Two machines."""
    has("partitions", (), "iproute2")
    with laboratory(tmp_path) as machines:
        yield machines


@contextlib.contextmanager
def cut(lab: Lab, ports: Sequence[int]) -> Iterator[None]:
    """Within, nothing comes through to these ports of the first machine, nor from them to the second one."""
    rules = [("add", "pref", "100", "lookup", "local"), ("del", "pref", "0")]
    for number, end in ((1, "dport"), (2, "sport")):
        for rule in rules:
            run(*lab.within(number), "ip", "rule", *rule)
        for port in ports:
            match = ("iif", "eth0", "ipproto", "tcp", end, str(port), "blackhole")
            run(*lab.within(number), "ip", "rule", "add", "pref", "10", *match)
    try:
        yield
    finally:
        for number in (1, 2):
            for _ in ports:
                run(*lab.within(number), "ip", "rule", "del", "pref", "10")


@long
@SECONDS
@pytest.mark.parametrize("which", ["all", "control", "tensors"])
def test_a_network_may_be_cut(lab: Lab, tmp_path: Path, which: str, seconds: int) -> None:
    """Between a worker and server 1: the machine, or one of the two ports at which it listens alone."""
    machine = {"server": 1, "worker": 2}
    with job(tmp_path, lambda i: f"{NETWORK}.2:0", lambda role: lab.within(machine[role])) as one:
        one.goes_on()
        control, tensors = one.ports(1)
        ports = {"all": [control, tensors], "control": [control], "tensors": [tensors]}
        with cut(lab, ports[which]):
            time.sleep(seconds)
        one.goes_on()
        one.end()
