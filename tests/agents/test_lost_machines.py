"""A machine is lost with all of its processes, and the job goes on without it."""

import json
import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import psfleet
from psfleet_launch.chaos.fault_schedule import schedule
from psfleet_launch.job.job_request import JobRequest
from tests.agents.conftest import TRAINER, TWO, Site
from tests.agents.machines import NETWORK, Lab, has, laboratory
from tests.launch.conftest import ROOT, Launcher, digest
from tests.waiting import pause

ONE = ("--servers", "2", "--workers", "1", "--no-progress")
STEPS = (TRAINER, "30", "0.5")
ALONE = "97815fb735bc8d83840a37c8ac62e94a0f291c07c78c8d5c9f740159f3c27467"
"""Digest of `trainer.py 30` with one worker, on one machine and without a fault."""


@pytest.fixture(params=["join"], scope="session")
def engine(request: pytest.FixtureRequest) -> tuple[str, None]:
    """Agents that each test starts by itself."""
    return request.param, None


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Lab]:
    """Three machines that may lose their power."""
    has("join", (), "iproute2")
    with laboratory(tmp_path, ("alpha", "beta", "gamma")) as made:
        yield made


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Lab]:
    """Two machines."""
    has("join", (), "iproute2")
    with laboratory(tmp_path) as made:
        yield made


def test_a_job_goes_on_on_other_machines(site: Site) -> None:
    """The agent of server 1 is killed, and a standby takes over: no push is lost, so no bit changes."""
    plain = site.start(*ONE, TRAINER, "30")
    code, out, err = site.ends(plain)
    assert code == 0, err
    machines = ("--engine", "join", "--agents", "3", "--listen", "127.0.0.1")
    launcher = site.start(*machines, *ONE, "--replicas", "1", "--job", "lossy", *STEPS)
    for number, name in enumerate(("alpha", "beta", "gamma")):
        site.join(launcher, name, f"127.0.0.{number + 2}")
    launcher.until_logged("serverlog.1.copy.1", "standby 1 of server 1 ready")
    launcher.until_logged("workerlog.0", "step 5")
    os.kill(site.agent_pid(launcher, "beta"), signal.SIGKILL)
    code, found, err = site.ends(launcher)
    assert code == 0, err
    assert "the agent on host beta is lost: its connection has ended" in err
    assert "server 1 copy 1 takes over" in err
    assert digest(found) == digest(out)


def test_a_reader_follows_a_server_to_another_machine(site: Site) -> None:
    """A process without a seat, which knows the folder of the job's logs, reads on from the standby."""
    gate, logs = site.folder / "gate", site.folder / "psfleet-logs" / "read"
    machines = ("--engine", "join", "--agents", "3", "--listen", "127.0.0.1")
    kept = ("--replicas", "1", "--job", "read")
    launcher = site.start(*machines, *ONE, *kept, TRAINER, "30", "0", str(gate))
    for number, name in enumerate(("alpha", "beta", "gamma")):
        site.join(launcher, name, f"127.0.0.{number + 2}")
    launcher.until_logged("serverlog.1.copy.1", "standby 1 of server 1 ready")
    launcher.until_logged("workerlog.0", "step 9")
    with psfleet.connect(job=logs) as reader:
        users = reader.sparse_table("users")
        before = users.pull(np.arange(1000)).tobytes()
        os.kill(site.agent_pid(launcher, "beta"), signal.SIGKILL)
        launcher.until(lambda: "server 1 copy 1 takes over" in site.said(), "takeover")
        assert users.pull(np.arange(1000)).tobytes() == before
        assert reader.version is not None
        assert reader.version.is_cut
    gate.touch()
    code, out, err = site.ends(launcher)
    assert code == 0, err
    assert digest(out) == ALONE


def on_machines(site: Site, machines: Lab, *script: str) -> Launcher:
    """A job with an agent on each machine, under way and with standbys."""
    site.lab = machines
    agents = str(len(machines.hosts))
    engine = ("--engine", "join", "--agents", agents, "--listen", f"{NETWORK}.1")
    launcher = site.start(*engine, *ONE, "--replicas", "1", *script)
    for number, name in enumerate(machines.hosts, 1):
        site.join(launcher, name, "", *machines.within(number))
    for rank in (0, 1):
        launcher.until_logged(f"serverlog.{rank}.copy.1", f"standby 1 of server {rank} ready")
    launcher.until_logged("workerlog.0", "step 5")
    return launcher


@pytest.mark.parametrize("victim", ["alpha", "beta"])
def test_a_machine_without_power_is_replaced_at_once(
    site: Site, machines: Lab, victim: str
) -> None:
    """Nobody hears of the end of its processes, and no call to it ends; yet no push is lost, no bit changes.

    The standby takes over before the machine is given up. Server 0, with the coordinator, is on alpha.
    """
    launcher = on_machines(site, machines, *STEPS)
    machines.power_off(victim)
    try:
        code, out, err = site.ends(launcher)
    finally:
        machines.cut(victim, is_up=True)
    assert code == 0, err
    said = f"host {victim} cannot be reached"
    server = machines.hosts.index(victim)
    takeover = f"server {server} cannot be reached; server {server} copy 1 takes over"
    assert said in err
    assert takeover in err
    assert digest(out) == ALONE


def test_a_machine_that_comes_back_is_fenced(site: Site, pair: Lab) -> None:
    """Its cable was out until a standby took over: its server is killed, and it gets a new standby."""
    gate = site.folder / "gate"
    launcher = on_machines(site, pair, *STEPS, str(gate))
    old = launcher.pid_of("server", 1)
    pair.cut("beta")
    try:
        launcher.until(lambda: "server 1 copy 1 takes over" in site.said(), "takeover")
    finally:
        pair.cut("beta", is_up=True)
    launcher.until(lambda: not Path(f"/proc/{old}").exists(), "end of the old server")
    launcher.until(
        lambda: (
            "standby 2 of server 1 ready" in launcher.log("serverlog.1.copy.2")
            or "agent on host beta is lost" in site.said()
        ),  # all this took more than 10 s
        "next standby",
    )
    gate.touch()
    code, out, err = site.ends(launcher)
    assert code == 0, err
    assert "server 1 cannot be reached; server 1 copy 1 takes over" in err
    assert digest(out) == ALONE


def test_a_stopped_agent_is_given_up_late_and_fenced(site: Site) -> None:
    """Its machine can be reached, so it is waited for; when it goes on, it ends all that it has started."""
    gate = site.folder / "gate"
    machines = ("--engine", "join", "--agents", "3", "--listen", "127.0.0.1")
    launcher = site.start(*machines, *ONE, "--replicas", "1", TRAINER, "30", "0", str(gate))
    for number, name in enumerate(("alpha", "beta", "gamma")):
        site.join(launcher, name, f"127.0.0.{number + 2}")
    launcher.until_logged("serverlog.1.copy.1", "standby 1 of server 1 ready")
    launcher.until_logged("workerlog.0", "step 9")
    old, agent = launcher.pid_of("server", 1), site.agents[1]
    pause(agent)
    launcher.until_logged("serverlog.1.copy.1", "took over with term 2")
    assert Path(f"/proc/{old}").exists()
    agent.send_signal(signal.SIGCONT)
    said, _ = agent.communicate()
    assert agent.returncode == 1, (
        said
    )  # it is refused, unless it has noticed its own silence before
    launcher.until(lambda: not Path(f"/proc/{old}").exists(), "end of the old server")
    gate.touch()
    code, out, err = site.ends(launcher)
    assert code == 0, err
    assert "the agent on host beta is lost: it has been silent for too long" in err
    assert "cannot be reached" not in err
    assert digest(out) == ALONE


def test_a_server_goes_on_from_a_shared_log(site: Site) -> None:
    """The agent of server 1 is killed; another machine goes on from its log: no bit changes."""
    plain = site.start(*ONE, TRAINER, "30")
    code, out, err = site.ends(plain)
    assert code == 0, err
    machines = ("--engine", "join", "--agents", "3", "--listen", "127.0.0.1")
    kept = ("--durability", "log", "--restart-servers", "2", "--job", "lossy")
    launcher = site.start(*machines, *ONE, *kept, *STEPS)
    for number, name in enumerate(("alpha", "beta", "gamma")):
        site.join(launcher, name, f"127.0.0.{number + 2}")
    log = site.folder / "psfleet-logs" / "lossy" / "workerlog.0"
    launcher.until(lambda: log.exists() and "step 5" in log.read_text(), "step 5")
    os.kill(site.agent_pid(launcher, "beta"), signal.SIGKILL)
    code, found, err = site.ends(launcher)
    assert code == 0, err
    assert "server 1 ended with signal 9; it goes on from its log (restart 1 of 2)" in err
    assert digest(found) == digest(out)


def test_chaos_takes_a_machine(site: Site) -> None:
    """One of three is lost with its servers and its worker: every push is counted once, and the job ends."""
    script = str(ROOT / "tests" / "chaos" / "scripts" / "trainer.py")
    request = JobRequest(script, servers=2, workers=2, replicas=1, worker_restarts=2)
    seed = next(n for n in count() if next(schedule(n, request, machines=3)).kind == "lose")
    machines = ("--engine", "join", "--agents", "3", "--listen", "127.0.0.1")
    chaos = ("--chaos", str(seed), "--replicas", "1", "--restart-workers", "2", "--job", "j")
    launcher = site.start(*machines, *TWO, *chaos, script, "async", "100000")
    gate = site.folder / "gate"
    for number, name in enumerate(("alpha", "beta", "gamma")):
        site.join(launcher, name, f"127.0.0.{number + 2}", SOAK_GATE=str(gate))
    lost = "is lost: its connection has ended"
    launcher.until(lambda: lost in site.said() and "takes over" in site.said(), "loss")
    gate.touch()
    code, _, err = site.ends(launcher)
    assert code == 0, err
    assert ": machine of server " in err
    report = json.loads((site.folder / "psfleet-logs" / "j" / "chaos.json").read_text())
    assert report["faults"][0]["kind"] == "lose"
    verdicts = {one["promise"][0]: one["verdict"] for one in report["promises"]}
    assert (verdicts["2"], verdicts["7"]) == ("kept", "kept"), report
    assert "BROKEN" not in verdicts.values()
