"""Another number of servers on several machines, with folders of logs of their own."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from psfleet.core.base.scaling_files import (
    SCALED,
    Scaled,
    read_promise,
    read_scale,
    read_scaled,
    write_promise,
    write_scale,
    write_scaled,
)
from psfleet_launch.commands.psfleet_cli import main
from psfleet_launch.engines.remote.agent_messages import JobFile, JobFiles, LauncherFiles
from tests.agents.conftest import JOIN, JOINED, TWO, Site
from tests.launch.conftest import ROOT, Launcher, digest

SCRIPT = str(ROOT / "tests" / "launch" / "scaling.py")
DIGESTS = {
    1: "866b1daa760d7548f4c68bd0963f4a9e5dde7e2b7d87cd480412e6ffbf707cb9",
    2: "dc116c065a37e434cecf8ca0ba140b34c643374c5aa16c479a6f41b67ef8cd22",
}
"""Of `scaling.py 12` in a job of two servers, by its number of workers."""


ONE = ("--servers", "2", "--workers", "1", "--no-progress", "--job", "j")
_ALONE = (
    "umask 077 && exec 3<{0}/j/agent.json && mount -t tmpfs none {0} && mkdir {0}/j && "
    'cat <&3 >{0}/j/agent.json && exec "$@"'
)


@pytest.mark.parametrize("engine", ["ssh", "slurm", "ray"], indirect=True)
def test_every_engine(site: Site, tmp_path: Path) -> None:
    """A job of two servers gets three of them, as a script asks, and ends with the bits of one that keeps its
    two. (Agents that join: the next test. On this machine: tests/launch/test_scaling.py.)"""
    job = site.launch(*TWO, SCRIPT, "12", str(tmp_path), "3")
    job.until(lambda: (tmp_path / "runs.1").exists(), "a first barrier")
    job.until(lambda: "servers   3 from now on" in site.said(), "three servers")
    (tmp_path / "go").touch()
    out, _ = site.ends_with(0, job)
    assert (tmp_path / "servers.1").read_text() == "3"
    assert digest(out) == DIGESTS[2]


def joined(site: Site, tmp_path: Path, *words: str, asks: str = "", **crashes: str) -> Launcher:
    """A job of agents alpha, beta and gamma, each with a folder of logs of its own, at a first barrier.

    Args:
        asks: For how many servers the script asks.
        crashes: Where a server that an agent has started dies, by the name of the agent.
    """
    if os.geteuid() != 0:
        pytest.skip("a folder of one machine needs root, for a file system of its own")
    job = site.start(*JOIN, "--agents", "3", *ONE, *words, SCRIPT, "12", str(tmp_path), asks)
    for number, name in enumerate(("alpha", "beta", "gamma"), 2):
        own = _ALONE.format(tmp_path / "psfleet-logs")
        alone = ("unshare", "--mount", "sh", "-c", own, "sh")
        point = {"PSFLEET_CRASH": crashes[name]} if name in crashes else {}
        site.join(job, name, f"127.0.0.{number}", *alone, **point)
    ended = job.process.poll
    job.until(lambda: (tmp_path / "runs.0").exists() or ended() is not None, "a first barrier")
    return job


def scaled(tmp_path: Path, servers: int, within: int = 300) -> bool:
    """Whether the job has so many servers within some seconds after a request."""
    words = ("--wait", str(within), "--log-dir", str(tmp_path / "psfleet-logs"))
    return main(["scale", "j", "--servers", str(servers), *words]) == 0


def ends_alike(site: Site, tmp_path: Path, job: Launcher, servers: int) -> str:
    """Let it train to its end, with so many servers and the bits of a job that keeps two; all it said."""
    (tmp_path / "go").touch()
    out, err = site.ends_with(0, job)
    assert (tmp_path / "servers.0").read_text() == str(servers)
    assert digest(out) == DIGESTS[1]
    return err


@JOINED
@pytest.mark.timeout(500)
def test_servers_on_other_machines(site: Site, tmp_path: Path) -> None:
    """Servers come and go as a script asks and the command, though no two machines share a folder."""
    job = joined(site, tmp_path, asks="3")
    job.until(lambda: "servers   3 from now on" in site.said(), "what the script asks for")
    for servers in (1, 4):
        assert scaled(tmp_path, servers)
        assert job.pid_of("server", servers - 1)
    ends_alike(site, tmp_path, job, 4)


@pytest.mark.long
@JOINED
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("host", "point", "moves"), [("alpha", "promised", False), ("beta", "adopted", True)]
)
def test_logs_on_their_machines(
    site: Site, tmp_path: Path, host: str, point: str, moves: bool
) -> None:
    """A server that is killed goes on from the log that counts: before the decision from its old one, and
    after it from the new one, though the decision was made on another machine. (Every point:
    the suites "logs moves" of tests/protocol.)"""
    job = joined(site, tmp_path, "--durability", "log", **{host: f"{point}:1"})
    assert scaled(tmp_path, 3) is moves
    job.until(lambda: "it goes on from its log" in site.said(), "a restart")
    if moves:
        assert scaled(tmp_path, 2)
    said = ends_alike(site, tmp_path, job, 2)
    assert said.count("it goes on from its log") == 1 + moves


@pytest.mark.long
@JOINED
@pytest.mark.timeout(500)
def test_machines_that_are_lost(site: Site, tmp_path: Path) -> None:
    """A machine that is lost while rows are on their way gives the move up, and one that is lost once they
    have moved changes nothing: standbys on other machines go on."""
    job = joined(site, tmp_path, "--replicas", "1")
    for rank in (0, 1):
        job.until_logged(f"serverlog.{rank}.copy.1", f"standby 1 of server {rank} ready")
    (tmp_path / "hold").touch()
    job.until(lambda: (tmp_path / "held.0").exists(), "a worker that waits")
    assert not scaled(tmp_path, 3, within=0)
    job.until_logged("serverlog.0", "rows are copied for 3 servers")
    os.kill(site.agent_pid(job, "alpha"), signal.SIGKILL)
    job.until_logged("serverlog.0.copy.1", "took over")
    assert "the number of servers stays as it is: server 0 has a new process" in site.said()
    (tmp_path / "hold").unlink()
    assert scaled(tmp_path, 3)
    assert "to no standby" not in job.log("serverlog.*")
    os.kill(site.agent_pid(job, "beta"), signal.SIGKILL)
    said = ends_alike(site, tmp_path, job, 3)
    assert "server 1 ended" in said or "server 2 ended" in said


def test_files_of_a_job_go_both_ways(tmp_path: Path) -> None:
    """What the launcher or a server writes every other machine gets once, in time for what it starts later,
    and never back. What an earlier job has left is removed; other names are left alone, and a file
    that cannot be written yet is written as soon as it can."""
    folders = [tmp_path / name for name in ("launcher", "alpha", "beta")]
    for folder in folders:
        folder.mkdir()
    write_scaled(folders[1], Scaled(9, ("unix:/gone",), 9))
    launcher = LauncherFiles(folders[0])
    machines = {folder.name: JobFiles(folder) for folder in folders[1:]}
    launcher.add(machines)

    def pass_on() -> None:
        for name, machine in machines.items():
            for file in machine.changed(machine.present()):
                launcher.take(name, file)
        for name, file in launcher.changed():
            machines[name].take(file)

    machines["alpha"].clear()
    assert not [*folders[1].iterdir()]
    write_scale(folders[1], 4)
    write_promise(folders[2], 7)
    pass_on()
    assert {read_scale(folder) for folder in folders} == {(1, 4)}
    assert read_promise(folders[0]) == (7, "")
    assert read_promise(folders[1]) == (0, "")
    shutil.rmtree(folders[2])
    write_scaled(folders[0], decided := Scaled(1, ("unix:/a",), 1))
    pass_on()
    assert machines["beta"].late
    assert read_scaled(folders[1]) == decided
    folders[2].mkdir()
    pass_on()
    assert read_scaled(folders[2]) == decided
    assert not machines["beta"].late
    assert not [*launcher.changed()]
    launcher.take("alpha", JobFile(name="../escape", content=b"x"))
    launcher.take("alpha", JobFile(name=SCALED, content=b"x"))
    assert not (tmp_path / "escape").exists()
    assert read_scaled(folders[0]) == decided
