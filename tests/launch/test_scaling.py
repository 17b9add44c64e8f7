"""psfleet scale: a running job gets another number of servers."""

import os
import selectors
import signal
from pathlib import Path

import pytest

from psfleet.core.base.job_files import write_ready
from psfleet.core.base.scaling_files import read_promise, read_scaled, write_scale
from psfleet_launch.commands.psfleet_cli import main
from psfleet_launch.console.screen import Screen
from psfleet_launch.engines.local import LocalEngine
from psfleet_launch.job.job_plan import Job, Member
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.job_runner import JobRunner
from psfleet_launch.supervision.job_events import ServerReady
from psfleet_launch.supervision.standbys import Standbys
from psfleet_launch.supervision.supervisor import Supervisor
from tests.launch.conftest import Launch, Launcher, digest

SCRIPT = str(Path(__file__).with_name("scaling.py"))
TWO = ("--servers", "2", "--workers", "2", "--no-progress")
DIGEST = "dc116c065a37e434cecf8ca0ba140b34c643374c5aa16c479a6f41b67ef8cd22"
"""Of `scaling.py 12` with two workers on two servers that stay."""


def start(launch: Launch, folder: Path, *more: str, **variables: str) -> Launcher:
    """A job of two servers, at its first barrier."""
    job = launch(*TWO, *more, "--job", "j", SCRIPT, "12", str(folder), "", **variables)
    job.until(lambda: (folder / "runs.1").exists(), "a first barrier")
    return job


def ends_alike(job: Launcher, folder: Path, servers: int) -> str:
    """Let it train to its end, with so many servers and the bits of a job that keeps two; what it said."""
    (folder / "go").touch()
    out, err = job.ends_with(0, 120)
    assert (folder / "servers.0").read_text() == str(servers)
    assert digest(out) == DIGEST
    return err


def scaled(folder: Path, servers: int, wait: int = 120) -> bool:
    """Whether the job has so many servers within some seconds after a request."""
    words = ("--wait", str(wait), "--log-dir", str(folder / "psfleet-logs"))
    return main(["scale", "j", "--servers", str(servers), *words]) == 0


def copy_rows(job: Launcher, folder: Path) -> None:
    """Have rows copied for three servers while the workers stand still."""
    (folder / "hold").touch()
    job.until(lambda: (folder / "held.0").exists(), "a worker that waits")
    assert not scaled(folder, 3, wait=0)
    job.until_logged("serverlog.0", "rows are copied for 3 servers")


@pytest.mark.timeout(300)
def test_a_running_job_gets_more_and_fewer_servers(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers are started and ended, all workers go on with them, and the rows in the end have the bits of a
    job that has kept its two servers; numbers that cannot be are refused with the reason."""
    job = start(launch, tmp_path)
    for servers, says in ((0, "1 to 1024"), (-2, "1 to 1024"), (5000, "5000 servers are wanted")):
        assert not scaled(tmp_path, servers)
        assert says in capsys.readouterr().err
    for servers in (4, 1, 1, 3):
        assert scaled(tmp_path, servers)
        assert capsys.readouterr().out == f"job j has {servers} servers\n"
        assert job.pid_of("server", servers - 1)
    err = ends_alike(job, tmp_path, 3)
    assert "servers   3 from now on" in err


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_new_server_that_is_killed(launch: Launch, tmp_path: Path) -> None:
    """A new server that dies before the rows have moved gives the move up; the job trains on with its two
    servers, and can be asked again. One that dies later ends the job as any server does."""
    job = start(launch, tmp_path)
    copy_rows(job, tmp_path)
    os.kill(job.pid_of("server", 2), signal.SIGKILL)
    (tmp_path / "hold").unlink()
    assert scaled(tmp_path, 3)
    assert "server 2" in job.log("serverlog.0")
    os.kill(job.pid_of("server", 2), signal.SIGKILL)
    code, _, err = job.ends(120)
    assert code == 128 + signal.SIGKILL
    assert "server 2" in err


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_with_logs(launch: Launch, tmp_path: Path) -> None:
    """Servers that keep logs move their rows too: afterwards the launcher starts a new one and server 0 again
    when they die, and the rows in the end have the bits of a job without any of that. (Without a launcher:
    tests/cluster/test_scaling_logs.py.)"""
    job = start(launch, tmp_path, "--durability", "log")
    for servers in (3, 1):
        assert scaled(tmp_path, servers)
        os.kill(job.pid_of("server", servers - 1), signal.SIGKILL)
        job.until_logged(f"serverlog.{servers - 1}", "back after")
    err = ends_alike(job, tmp_path, 1)
    assert err.count("it goes on from its log") == 2


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_with_standbys(launch: Launch, tmp_path: Path) -> None:
    """Each server of another number gets a standby, which takes over when it dies, a new one and server 0;
    the rows in the end have the bits of a job without any of that. (Without logs:
    tests/agents/test_scaling.py.)"""
    job = start(launch, tmp_path, "--replicas", "1", "--durability", "log")
    for servers, standby in ((3, 1), (1, 3)):
        assert scaled(tmp_path, servers)
        log = f"serverlog.{servers - 1}.copy.{standby}"
        job.until_logged(log, f"standby {standby} of server {servers - 1} ready")
        os.kill(job.pid_of("server", servers - 1), signal.SIGKILL)
        job.until_logged(log, "took over")
    ends_alike(job, tmp_path, 1)


def test_a_standby_that_is_ready_late(tmp_path: Path) -> None:
    """One that a move has dropped while it started, with its server, may yet say where it listens: the job
    has no such server."""
    job = Job(JobRequest(SCRIPT, servers=1, replicas=1), "j", "token", tmp_path, tmp_path)
    supervisor = Supervisor((*job.servers,), (*job.workers,), standbys=Standbys())
    with selectors.DefaultSelector() as selector:
        engine = LocalEngine(job, selector)
        runner = JobRunner(job, engine, supervisor, Screen(progress=False))
        dropped = Member("server", 1, copy=1)
        engine.expect(dropped)
        write_ready(job.ready_file(dropped), 1, "unix:/gone", os.getpid())
        assert runner._happened() == [ServerReady(dropped, "unix:/gone")]
        assert runner.endpoints == engine.endpoints()


def test_a_request_that_cannot_be_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher tries again at each of its steps, and says each reason once."""
    job = Job(JobRequest(SCRIPT, servers=1), "j", "token", tmp_path, tmp_path)
    write_scale(tmp_path, 5000)
    draft = tmp_path / f".scale.done.{os.getpid()}"  # where the answer is written first
    draft.mkdir()

    def said() -> int:
        return capsys.readouterr().err.count("cannot be answered")

    with selectors.DefaultSelector() as selector:
        supervisor = Supervisor((*job.servers,), (*job.workers,))
        runner = JobRunner(job, LocalEngine(job, selector), supervisor, Screen(progress=False))
        runner._answering.update(job.servers)
        for _ in range(3):
            runner._scale()
        assert said() == 1
        draft.rmdir()
        draft.symlink_to(draft)  # goes with the first attempt
        runner._scale()
        assert said() == 1
        runner._scale()
        assert said() == 0
        assert "5000 servers are wanted" in read_scaled(tmp_path).why
        write_scale(tmp_path, 5001)
        draft.mkdir()
        runner._scale()
        assert said() == 1


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("rank", "late"), [(0, False), (1, True), (2, False), (2, True)])
def test_a_server_that_dies_around_the_decision(
    launch: Launch, tmp_path: Path, rank: int, late: bool
) -> None:
    """A server that has promised its part is killed. If the launcher hears it before it decides, the move is
    given up and can be asked for again; an old server's standby goes on with the rows of before. If it hears
    it afterwards, as where the kernel tells it late, the standby goes on that has taken rows meanwhile."""
    job = start(launch, tmp_path, "--replicas", "1")
    for server in (0, 1):
        job.until_logged(f"serverlog.{server}.copy.1", f"standby 1 of server {server} ready")
    copy_rows(job, tmp_path)
    server, folder = job.pid_of("server", rank), tmp_path / "psfleet-logs" / "j"
    # Stopped while it waits for events: afterwards it hears of the death before it reads the promise.
    job.until(lambda: _status(job.process.pid)[0] == "S", "the launcher's wait")
    job.process.send_signal(signal.SIGSTOP)
    (tmp_path / "hold").unlink()
    job.until(lambda: read_promise(folder)[0] > 0, "a promise")
    os.kill(server, signal.SIGSTOP if late else signal.SIGKILL)
    job.until(lambda: late or _has_ended(server), "its end")
    job.process.send_signal(signal.SIGCONT)
    if late:
        job.until(lambda: read_scaled(folder).generation > 0, "a decision")
        os.kill(server, signal.SIGKILL)
    else:
        assert scaled(tmp_path, 3)
    err = ends_alike(job, tmp_path, 3)
    assert ("stays as it is" in err) is not late
    assert err.count("takes over") == (late or rank < 2)


def _status(process: int) -> list[str]:
    """The words of its `stat`, from its state on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()


def _has_ended(process: int) -> bool:
    """Whether it has ended with all its threads."""
    words = _status(process)
    return words[0] == "Z" and words[17] == "1"


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("point", "takeovers"), [("decided:1", 1), ("adopted:1", 3)])
def test_servers_that_die_after_the_decision(
    launch: Launch, tmp_path: Path, point: str, takeovers: int
) -> None:
    """Server 0 as it reads the decision, or each one as it puts the new rows in the place of the old:
    standbys have these rows, and the job loses nothing."""
    job = start(launch, tmp_path, "--replicas", "1", PSFLEET_CRASH=point)
    assert scaled(tmp_path, 3)
    err = ends_alike(job, tmp_path, 3)
    assert err.count("takes over") == takeovers


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_that_must_end_after_a_move(launch: Launch, tmp_path: Path) -> None:
    """SIGUSR1 takes a snapshot of all three servers, from which a job of two goes on."""
    job = start(launch, tmp_path, "--durability", "log", "--snapshot-every", "1 rounds")
    job.until(lambda: bool(_snapshots(tmp_path)), "a snapshot")
    assert scaled(tmp_path, 3)
    job.process.send_signal(signal.SIGUSR1)
    job.ends()
    path = _snapshots(tmp_path)[-1]
    assert len([*path.glob("shard-*")]) == 3
    (tmp_path / "go").touch()
    again = launch(*TWO, "--job", "k", "--resume", str(path), SCRIPT, "12", str(tmp_path), "")
    again.ends_with(0)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["promised", "moved"])
def test_a_launcher_that_is_killed(launch: Launch, tmp_path: Path, moment: str) -> None:
    """All processes end with the launcher, whether all servers have promised and it has not decided, or the
    rows have moved. In the same folder another one goes on from the last snapshot, of before the move, with
    the old number of servers or the new one, whose bits are the same, and can change it again."""
    job = start(launch, tmp_path, "--durability", "log", "--snapshot-every", "1 rounds")
    job.until(lambda: bool(_snapshots(tmp_path)), "a snapshot")
    folder = tmp_path / "psfleet-logs" / "j"
    if moment == "promised":
        copy_rows(job, tmp_path)
        job.process.send_signal(signal.SIGSTOP)
        (tmp_path / "hold").unlink()
        job.until(lambda: read_promise(folder)[0] > 0, "a promise")
    else:
        assert scaled(tmp_path, 3)
    job.process.kill()
    job.process.wait()
    job.until(lambda: not job.family(), "the end of all processes")
    job.ends()
    assert len([*_snapshots(tmp_path)[-1].glob("shard-*")]) == 2
    found = set()
    for before, after in ((2, 3), (3, 2)):
        for name in ("go", "runs.1"):
            (tmp_path / name).unlink(missing_ok=True)
        number = ("--servers", str(before), "--workers", "2", "--no-progress", "--job", "j")
        resumed = ("--durability", "log", "--resume", str(folder))
        again = launch(*number, *resumed, SCRIPT, "12", str(tmp_path), "")
        again.until(lambda: (tmp_path / "runs.1").exists(), "a first barrier")
        assert scaled(tmp_path, after)
        (tmp_path / "go").touch()
        out, _ = again.ends_with(0, 120)
        found.add(digest(out))
    assert len(found) == 1


def _snapshots(folder: Path) -> list[Path]:
    """The complete snapshots in order; drafts have other names."""
    return sorted(folder.glob("psfleet-logs/j/snapshots/snapshot-*"))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_worker_that_is_killed(launch: Launch, tmp_path: Path) -> None:
    """A worker that dies and starts again takes part in the next move, and knows the servers of the last."""
    job = start(launch, tmp_path, "--restart-workers", "3")
    assert scaled(tmp_path, 4)
    os.kill(job.pid_of("worker", 1), signal.SIGKILL)
    assert scaled(tmp_path, 3)
    (tmp_path / "go").touch()
    out, _ = job.ends_with(0, 120)
    assert (tmp_path / "servers.1").read_text() == "3"
    assert digest(out)
