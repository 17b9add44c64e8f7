"""A machine is lost with all of its processes, and the job goes on without it."""

import json
import os
import signal
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import psfleet
from psfleet_launch.chaos.fault_schedule import schedule
from psfleet_launch.job.job_request import JobRequest
from tests.agents.conftest import JOIN, JOINED, TRAINER, TWO, Site
from tests.agents.machines import NETWORK, Lab
from tests.launch.conftest import ROOT, Launcher, digest
from tests.waiting import pause

pytestmark = JOINED
ONE = ("--servers", "2", "--workers", "1", "--no-progress")
STEPS = (TRAINER, "30", "0.5")
ALONE = "32e75e4a64a5aba7e91ce39d4456ebbeeb70b18341d0a7a0e797a3a34ed1e509"
"""Digest of `trainer.py 30` with one worker, on one machine and without a fault."""


@pytest.mark.long
def test_the_standby_on_another_machine_takes_over(site: Site) -> None:
    """The agent of server 1 is killed: no push is lost, so no bit changes. A process without a seat, which
    knows the folder of the job's logs, reads on from the standby."""
    gate, logs = site.folder / "gate", site.folder / "psfleet-logs" / "read"
    kept = ("--replicas", "1", "--job", "read")
    launcher = site.launch(*ONE, *kept, TRAINER, "30", "0", str(gate), agents=3)
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
    out, err = site.ends_with(0, launcher)
    assert "the agent on host beta is lost: its connection has ended" in err
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
    launcher.until(lambda: "standbys  ready in " in site.said(), "word that standbys are ready")
    launcher.until_logged("workerlog.0", "step 5")
    return launcher


def test_a_machine_without_power_is_replaced_at_once(site: Site, machines: Lab) -> None:
    """Nobody hears of the end of its processes, and no call to it ends; yet no push is lost, no bit changes.

    The standby takes over before the machine is given up. Server 0, with the coordinator, is on alpha; for
    beta see tests/agents/test_kubernetes.py.
    """
    launcher = on_machines(site, machines, *STEPS)
    machines.power_off("alpha")
    try:
        code, out, err = site.ends(launcher)
    finally:
        machines.cut("alpha", is_up=True)
    assert code == 0, err
    assert "host alpha cannot be reached" in err
    assert "server 0 cannot be reached; server 0 copy 1 takes over" in err
    assert digest(out) == ALONE


@pytest.mark.long
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
    out, err = site.ends_with(0, launcher)
    assert "server 1 cannot be reached; server 1 copy 1 takes over" in err
    assert digest(out) == ALONE


@pytest.mark.long
def test_a_stopped_agent_is_given_up_late_and_fenced(site: Site) -> None:
    """Its machine can be reached, so it is waited for; when it goes on, it ends all that it has started."""
    gate = site.folder / "gate"
    launcher = site.launch(*ONE, "--replicas", "1", TRAINER, "30", "0", str(gate), agents=3)
    launcher.until_logged("serverlog.1.copy.1", "standby 1 of server 1 ready")
    launcher.until_logged("workerlog.0", "step 9")
    old, agent = launcher.pid_of("server", 1), site.agents[1]
    pause(agent)
    launcher.until_logged("serverlog.1.copy.1", "took over with term 2")
    assert Path(f"/proc/{old}").exists()
    agent.send_signal(signal.SIGCONT)
    said, _ = agent.communicate()
    # It is refused, unless it has noticed its own silence before.
    assert agent.returncode == 1, said
    launcher.until(lambda: not Path(f"/proc/{old}").exists(), "end of the old server")
    gate.touch()
    out, err = site.ends_with(0, launcher)
    assert "the agent on host beta is lost: it has been silent for too long" in err
    assert "cannot be reached" not in err
    assert digest(out) == ALONE


def test_a_server_goes_on_from_a_shared_log(site: Site) -> None:
    """The agent of server 1 is killed; another machine goes on from its log: no bit changes."""
    gate = site.folder / "gate"
    kept = ("--durability", "log", "--restart-servers", "2", "--job", "lossy")
    launcher = site.launch(*ONE, *kept, TRAINER, "30", "0", str(gate), agents=3)
    launcher.until_logged("workerlog.0", "step 9")
    os.kill(site.agent_pid(launcher, "beta"), signal.SIGKILL)
    launcher.until(lambda: "it goes on from its log" in site.said(), "restart")
    gate.touch()
    out, err = site.ends_with(0, launcher)
    lost = "the agent on host beta is lost: its connection has ended"
    assert f"server 1 ended with signal 9: {lost}; it goes on from its log (restart 1 of 2)" in err
    assert digest(out) == ALONE


@pytest.mark.long
def test_chaos_takes_a_machine(site: Site) -> None:
    """One of three is lost with its servers and its worker: every push is counted once, and the job ends."""
    script = str(ROOT / "tests" / "chaos" / "scripts" / "trainer.py")
    request = JobRequest(script, servers=2, workers=2, replicas=1, worker_restarts=2)
    first = ((n, next(schedule(n, request, machines=3, scales=True))) for n in count())
    seed = next(n for n, fault in first if fault.kind == "lose" and fault.member.rank < 2)
    chaos = ("--chaos", str(seed), "--replicas", "1", "--restart-workers", "2", "--job", "j")
    launcher = site.start(*JOIN, "--agents", "3", *TWO, *chaos, script, "async", "100000")
    gate = site.folder / "gate"
    site.join_all(launcher, 3, SOAK_GATE=str(gate))
    lost = "is lost: its connection has ended"
    launcher.until(lambda: lost in site.said() and "takes over" in site.said(), "loss")
    gate.touch()
    _, err = site.ends_with(0, launcher)
    assert ": machine of server " in err
    report = json.loads((site.folder / "psfleet-logs" / "j" / "chaos.json").read_text())
    assert report["faults"][0]["kind"] == "lose"
    verdicts = {one["promise"][0]: one["verdict"] for one in report["promises"]}
    assert (verdicts["2"], verdicts["7"]) == ("kept", "kept"), report
    assert "BROKEN" not in verdicts.values()
