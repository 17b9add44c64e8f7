"""What holds on every engine: the same bits, the first cause of a failure, and nothing left behind.

That last claim is checked by the `site` fixture after every test.
"""

import os
import signal

import numpy as np
import pytest

from tests.agents.conftest import JOINED, TRAINER, TWO, Site
from tests.launch.conftest import ROOT, digest

REMOTE = pytest.mark.parametrize("engine", ["join", "ssh", "slurm", "ray"], indirect=True)
CLUSTERS = pytest.mark.parametrize("engine", ["ssh", "slurm", "ray"], indirect=True)
"""Where a server dies. Agents that join lose whole machines: tests/agents/test_lost_machines.py."""
LONG = (TRAINER, "100000", "0.05")
DIGEST = "6876af5df9e9be88b932f715dab258a8c7d5a19e2ebc04f6b9e3aecdfd1e77ff"
"""Of `trainer.py 30` with two workers, as the local engine gave it before there was another one."""


def test_sync_mode_gives_the_same_bits(site: Site) -> None:
    """The final weights of a job do not depend on the engine; every process has its log."""
    needs = ("--worker-cores", "1", "--worker-memory", "512M")
    launcher = site.launch(*TWO, *needs, TRAINER, "30")
    out, err = site.ends_with(0, launcher)
    assert digest(out) == DIGEST
    assert f"{site.engine} · 2 servers · 2 workers" in err
    logs = {path.name for path in launcher.folder.glob("psfleet-logs/*/*log.*")}
    assert logs == {"serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1"}
    assert launcher.log("workerlog.0") == out
    assert "step 9" in launcher.log("workerlog.1")


@REMOTE
def test_a_killed_process_is_the_first_cause(site: Site) -> None:
    """SIGKILL of a server ends the job; the report names it, its host and its rank. (A worker:
    tests/agents/test_one_bad_machine.py.)"""
    launcher = site.launch(*TWO, *LONG)
    launcher.until_logged("workerlog.1", "step 9")
    os.kill(launcher.pid_of("server", 1), signal.SIGKILL)
    _, err = site.ends_with(128 + signal.SIGKILL, launcher)
    assert "server 1 failed first: killed by SIGKILL" in err
    assert f"host {site.hosts[1]} · rank 1" in err


@REMOTE
def test_a_script_that_fails_is_quoted(site: Site) -> None:
    """The exception of a worker on another machine is the headline, with the line of the script."""
    launcher = site.launch(*TWO, TRAINER, "many")
    _, err = site.ends_with(1, launcher)
    assert "failed first: ValueError: invalid literal for int() with base 10: 'many'" in err
    assert "trainer.py:" in err


@REMOTE
def test_nothing_survives_a_killed_launcher(site: Site) -> None:
    """SIGKILL of the launcher ends all of its processes on all machines."""
    launcher = site.launch(*TWO, *LONG)
    launcher.until_logged("workerlog.1", "step 9")
    os.kill(site.launcher_pid(launcher), signal.SIGKILL)
    launcher.process.wait()
    launcher.until(lambda: not launcher.family(), "end of the family")
    for folder in launcher.folder.glob("psfleet-logs/*"):
        (folder / "agent.json").unlink(missing_ok=True)  # it is worthless by now


@REMOTE
def test_ctrl_c(site: Site) -> None:
    """SIGINT reaches workers as KeyboardInterrupt, and the job ends with 130.

    A worker on a busy host may be killed before it has said so; both rarely are.
    """
    launcher = site.launch(*TWO, *LONG)
    launcher.until_logged("workerlog.1", "step 9")
    launcher.process.send_signal(signal.SIGINT)
    _, err = site.ends_with(130, launcher)
    assert "stopped by SIGINT" in err
    logs = [launcher.log(f"workerlog.{rank}") for rank in (0, 1)]
    assert any("KeyboardInterrupt" in log for log in logs)


@CLUSTERS
def test_a_server_comes_back_from_its_log(site: Site) -> None:
    """A killed server is started again on its machine and goes on from its log: no bit changes."""
    gate = site.folder / "gate"
    launcher = site.launch(*TWO, "--durability", "log", TRAINER, "30", "0", str(gate))
    launcher.until_logged("workerlog.1", "step 9")
    os.kill(launcher.pid_of("server", 1), signal.SIGKILL)
    launcher.until(lambda: "it goes on from its log" in site.said(), "restart")
    gate.touch()
    out, err = site.ends_with(0, launcher)
    assert "server 1 ended with signal 9; it goes on from its log (restart 1 of 5)" in err
    assert digest(out) == DIGEST


@pytest.mark.long
@REMOTE
def test_a_job_goes_back_to_its_snapshot(site: Site) -> None:
    """With --durability snapshot all servers start again when one is killed."""
    options = ("--durability", "snapshot", "--snapshot-every", "5 rounds")
    gate = site.folder / "gate"
    launcher = site.launch(*TWO, *options, TRAINER, "30", "0", str(gate))
    launcher.until_logged("workerlog.1", "step 9")
    os.kill(launcher.pid_of("server", 1), signal.SIGKILL)
    gate.touch()
    _, _, err = site.ends(launcher)
    assert "a server died; generation 1 starts from" in err


@CLUSTERS
def test_a_standby_takes_over(site: Site) -> None:
    """With --replicas 1 a server dies and its standby goes on, on another machine: no bit changes."""
    gate = site.folder / "gate"
    launcher = site.launch(*TWO, "--replicas", "1", TRAINER, "30", "0", str(gate))
    launcher.until_logged("serverlog.1.copy.1", "standby 1 of server 1 ready")
    launcher.until_logged("workerlog.1", "step 9")
    os.kill(launcher.pid_of("server", 1), signal.SIGKILL)
    launcher.until(lambda: "server 1 copy 1 takes over" in site.said(), "takeover")
    gate.touch()
    out, err = site.ends_with(0, launcher)
    assert "server 1 ended with signal 9; server 1 copy 1 takes over" in err
    assert digest(out) == DIGEST


@REMOTE
def test_a_killed_agent_is_the_first_cause(site: Site) -> None:
    """SIGKILL of an agent ends the processes of its machine; the report names the machine."""
    launcher = site.launch(*TWO, *LONG)
    launcher.until_logged("workerlog.1", "step 9")
    os.kill(site.agent_pid(launcher, site.hosts[1]), signal.SIGKILL)
    _, err = site.ends_with(128 + signal.SIGKILL, launcher)
    lost = f"the agent on host {site.hosts[1]} is lost: its connection has ended"
    assert f"server 1 failed first: {lost}" in err
    assert f"host {site.hosts[1]} · rank 1" in err


@pytest.mark.long
@JOINED
def test_stages_train_on_one_of_the_machines(site: Site) -> None:
    """The stages of a worker, and a server on another machine, give the bits of the local engine."""
    script = str(ROOT / "tests" / "pipeline" / "scripts" / "trainer.py")
    stages = ("--pipeline", "1f1b", "--stages", "2", "--micro-batches", "4", "--no-progress")
    digests = []
    for name, start in (("local", site.start), ("agents", site.launch)):
        out = site.folder / f"{name}.npz"
        job = (*stages, "--servers", "2", "--job", name, script, str(out), "plain", "4")
        site.ends_with(0, start(*job, OMP_NUM_THREADS="1"))
        with np.load(out) as arrays:
            digests.append({key: value.tobytes() for key, value in arrays.items()})
    assert digests[0] == digests[1]
