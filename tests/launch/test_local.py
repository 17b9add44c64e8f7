"""Real processes: how jobs succeed, fail and are interrupted, and that nothing is left running.

That last claim is checked by the `launch` fixture after every test.
"""

import json
import os
import pty
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from psfleet.core.base.settings.environment import read_environment
from psfleet.core.runtime.strategy import resolve
from psfleet_launch.commands.psfleet_cli import main
from psfleet_launch.job.job_folder import private_folder
from psfleet_launch.observability.job_history import read_history
from psfleet_launch.observability.job_view import state
from tests.launch.conftest import Launch, Launcher, launches, stand_in_job

TWO = ("--servers", "2", "--workers", "2")


def seen(launcher: Launcher, rank: int = 0) -> dict[str, Any]:
    """What a worker that tells has seen: its variables and arguments."""
    document: dict[str, Any] = json.loads(launcher.log(f"workerlog.{rank}").splitlines()[0])
    return document


@pytest.fixture(scope="module")
def ended_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Launcher, int, str, str]:
    """A job whose workers tell what they see, with its exit code and what it has printed."""
    with launches(tmp_path_factory.mktemp("tells")) as launch:
        launcher = stand_in_job(launch)("tells", *TWO, "--async", fresh=True)
        return launcher, *launcher.ends()


Ended = tuple[Launcher, int, str, str]


def test_success_ends_with_0(ended_job: Ended) -> None:
    """A job whose workers succeed ends with 0, says so, and keeps its report and one log per process."""
    launcher, code, _, err = ended_job
    assert code == 0
    assert "local · 2 servers · 2 workers" in err
    assert "finished" in err
    logs = sorted(path.name for path in launcher.folder.glob("psfleet-logs/*/*"))
    kept = ["history.jsonl", "report.html"]
    assert logs == [*kept, "serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1"]


def test_the_environment_is_the_contract(ended_job: Ended) -> None:
    """Each worker's environment reads as its seat in a fleet of the requested size."""
    for rank in (0, 1):
        actual = seen(ended_job[0], rank)
        environment = read_environment(actual)
        assert (environment.role, environment.rank, environment.workers) == ("worker", rank, 2)
        assert len(environment.servers) == 2
        assert len(environment.worker_endpoints) == 2
        assert resolve(None, environment.strategy).consistency.mode == "async"
        assert actual["arguments"] == ["tells"]
        assert actual["PYTHONUNBUFFERED"] == "1"
        assert int(actual["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_output_of_worker_0_is_shown(ended_job: Ended) -> None:
    """Worker 0's output is the job's, stream by stream; the other workers' is in the logs only."""
    launcher, _, out, err = ended_job
    assert [json.loads(line)["PSFLEET_RANK"] for line in out.splitlines()] == ["0"]
    assert err.count("to stderr") == 1
    assert "to stderr" in launcher.log("workerlog.1")


def test_flags_go_before_the_strategy_file(job: Launch, tmp_path: Path) -> None:
    """A strategy file reaches the workers; --sync wins over what it says. With --tcp a server gets port 0,
    and workers get the endpoint that it has told."""
    (tmp_path / "s.toml").write_text('consistency.mode = "async"\ngradient_merge.k_steps = 4\n')
    launcher = job("tells", "--strategy", "s.toml", "--sync", "--tcp")
    assert "sync · gradient_merge" in launcher.ends()[2]
    actual = seen(launcher)
    settings = resolve(None, actual["PSFLEET_STRATEGY"])
    assert settings.consistency.mode == "sync"
    assert settings.gradient_merge is not None
    assert settings.gradient_merge.k_steps == 4
    assert actual["PSFLEET_SERVERS"] == "127.0.0.1:4711"


def test_what_the_launcher_leaves_to_the_user(job: Launch, tmp_path: Path) -> None:
    """Without --sync or --async no strategy is imposed, and a user's thread setting stays. A TMPDIR that is
    no part of an endpoint does not stop a job: its sockets lie in /tmp."""
    odd = tmp_path / "a,b"
    odd.mkdir()
    launcher = job("tells", OMP_NUM_THREADS="7", TMPDIR=str(odd))
    assert launcher.ends()[0] == 0
    actual = seen(launcher)
    assert "PSFLEET_STRATEGY" not in actual
    assert actual["OMP_NUM_THREADS"] == "7"
    assert re.fullmatch(r"unix:/tmp/psfleet-\w+/server.0", actual["PSFLEET_SERVERS"])
    assert not any(odd.iterdir())


@pytest.mark.parametrize("name", ["long" * 25, "a,b", "a b", "ä", "a%2fb", "a?b#c", ":"])
def test_a_temporary_folder_that_is_none_for_sockets_is_avoided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One that is too long for a socket's path, or no part of an endpoint."""
    (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name))
    with private_folder() as folder:
        assert re.fullmatch(r"/tmp/psfleet-\w+", str(folder))
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not any((tmp_path / name).iterdir())


def test_the_first_failure_is_the_last_word(job: Launch) -> None:
    """A worker's exception ends the job with its exit code and is told with its place and log. What the
    script has started ends with the job, even in a session of its own."""
    launcher = job("family@1", *TWO)
    code, _, err = launcher.ends()
    report = err[err.index("failed first") - len("worker 1 ") :]
    assert code == 1
    assert report.startswith(
        "worker 1 failed first: ValueError: feed 'ids' has shape (512, 9), the program wants"
    )
    assert "stand_in.py:" in report.splitlines()[1]
    assert "rank 1 · exit 1 ·" in report.splitlines()[1]
    assert "workerlog.1" in report.splitlines()[2]
    assert report.splitlines()[-1] == (
        "then stopped: worker 0, server 0, server 1 (asked to stop, clean). Job exit code 1."
    )


def test_who_does_not_stop_is_killed(job: Launch) -> None:
    """Processes that ignore SIGTERM are killed after the grace period, and are named."""
    launcher = job("stubborn", *TWO)
    until_hanging(launcher)
    os.kill(launcher.pid_of("server", 0), signal.SIGKILL)
    _, err = launcher.ends_with(137)
    assert "worker 0, worker 1 had to be killed" in err


def test_a_server_that_fails_to_start(job: Launch) -> None:
    """A server that ends before it is ready is the failure, with the end of its log."""
    _, err = job("server-fails").ends_with(1)
    assert "server 0 failed first: ended before it was ready: no memory for the tables" in err


def test_a_server_that_is_never_ready(job: Launch) -> None:
    """The start has a deadline, and its message says who was not ready."""
    _, err = job("server-hangs", "--servers", "2", "--start-timeout", "0.5").ends_with(1)
    assert "server 0 failed first: was not ready within 0.5 s; nor were server 1" in err


def test_grandchildren_end_too(job: Launch) -> None:
    """What a script that succeeds has left ends with the job, even in a session of its own."""
    assert job("family_succeeds").ends()[0] == 0


def until_hanging(launcher: Launcher) -> None:
    """Wait until both workers run."""
    for rank in (0, 1):
        launcher.until_logged(f"workerlog.{rank}", "hanging")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_forwarded(job: Launch, number: signal.Signals) -> None:
    """Workers get the launcher's signal and the time to save; the exit code is 128 + it. So it is when the
    terminal is gone, where nothing can be shown."""
    is_gone, (ours, terminal) = number == signal.SIGHUP, pty.openpty()
    launcher = job("tells_signals", *TWO, **({"terminal": terminal} if is_gone else {}))
    os.close(terminal)
    until_hanging(launcher)
    os.close(ours)
    launcher.process.send_signal(number)
    _, err = launcher.ends_with(128 + number)
    for rank in (0, 1):
        assert f"got {number.name}\nsaved" in launcher.log(f"workerlog.{rank}")
    if not is_gone:
        last = err.splitlines()[-1]
        assert last.startswith("stopped by SIGINT: worker 0, worker 1")
        assert last.endswith("(asked to stop, clean). Job exit code 130.")


def test_a_second_signal_kills(job: Launch) -> None:
    """A second Ctrl-C does not wait for the grace period, in which servers would only be asked to end."""
    launcher = job("stubborn", *TWO)
    until_hanging(launcher)
    launcher.process.send_signal(signal.SIGINT)
    launcher.until_logged("workerlog.0", "got SIGINT")  # two at once would be one to the kernel
    launcher.process.send_signal(signal.SIGINT)
    _, err = launcher.ends_with(130)
    assert "worker 0, worker 1, server 0, server 1 had to be killed" in err


def test_ctrl_c_while_servers_start(job: Launch) -> None:
    """Ctrl-C counts before the servers are ready too."""
    launcher = job("server-hangs")
    launcher.until(lambda: len(launcher.family()) == 3, "server beside launcher and guard")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.ends()[0] == 130


def test_nothing_survives_a_killed_launcher(
    job: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even SIGKILL of the launcher takes the whole family with it, and its private folder. The report is made
    of what is on the disk: what ran, and that no end is recorded."""
    launcher = job("family_hangs", *TWO, "--job", "j", fresh=True)
    until_hanging(launcher)
    folder = launcher.folder / "psfleet-logs" / "j"
    report = ["report", "j", "--log-dir", str(folder.parent)]
    assert main(report) == 0
    assert state(read_history(folder), is_running=True).startswith("Running for ")
    words = Path(f"/proc/{launcher.pid_of('worker', 0)}/environ").read_text().split("\0")
    endpoint = dict(word.partition("=")[::2] for word in words)["PSFLEET_SERVERS"].split(",")[0]
    private = Path(endpoint.removeprefix("unix:")).parent
    assert private.stat().st_mode & 0o777 == 0o700
    launcher.process.kill()
    launcher.ends()
    launcher.until(lambda: not launcher.family(), "end of the family")
    assert not private.exists()
    assert main(report) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n" * 2
    page = (folder / "report.html").read_text()
    assert "No end is recorded: its launcher was killed after" in page
    assert '["worker 1","local","its end is not recorded","","",""]' in page
