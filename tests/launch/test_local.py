"""Real processes: how jobs succeed, fail and are interrupted, and that nothing is left running.

That last claim is checked by the `launch` fixture after every test.
"""

import json
import os
import pty
import re
import signal
import time
from pathlib import Path

import pytest

from psfleet.settings.environment import read_environment
from psfleet.strategy import resolve
from tests.launch.conftest import Launch

TWO = ("--servers", "2", "--workers", "2")


def test_success_ends_with_0(job: Launch) -> None:
    """A job whose workers succeed ends with 0, says so, and keeps its report and one log per process."""
    launcher = job("tells", *TWO)
    code, _, err = launcher.ends()
    assert code == 0
    assert "local · 2 servers · 2 workers" in err
    assert "finished" in err
    logs = sorted(path.name for path in launcher.folder.glob("psfleet-logs/*/*"))
    kept = ["history.jsonl", "report.html"]
    assert logs == [*kept, "serverlog.0", "serverlog.1", "workerlog.0", "workerlog.1"]


def test_the_environment_is_the_contract(job: Launch) -> None:
    """Each worker's environment reads as its seat in a fleet of the requested size."""
    launcher = job("tells", *TWO, "--async")
    launcher.ends()
    for rank in (0, 1):
        seen = json.loads(launcher.log(f"workerlog.{rank}").splitlines()[0])
        environment = read_environment(seen)
        assert (environment.role, environment.rank, environment.workers) == ("worker", rank, 2)
        assert len(environment.servers) == 2
        assert len(environment.worker_endpoints) == 2
        assert resolve(None, environment.strategy).consistency.mode == "async"
        assert seen["arguments"] == ["tells"]
        assert seen["PYTHONUNBUFFERED"] == "1"
        assert int(seen["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_flags_go_before_the_strategy_file(job: Launch, tmp_path: Path) -> None:
    """A strategy file reaches the workers; --sync wins over what it says."""
    (tmp_path / "s.toml").write_text('consistency.mode = "async"\ngradient_merge.k_steps = 4\n')
    launcher = job("tells", "--strategy", "s.toml", "--sync")
    assert "sync · gradient_merge" in launcher.ends()[2]
    seen = json.loads(launcher.log("workerlog.0").splitlines()[0])
    settings = resolve(None, seen["PSFLEET_STRATEGY"])
    assert settings.consistency.mode == "sync"
    assert settings.gradient_merge is not None
    assert settings.gradient_merge.k_steps == 4


def test_no_flag_leaves_the_strategy_to_the_script(job: Launch) -> None:
    """Without --sync or --async no strategy is imposed, and a user's thread setting stays."""
    launcher = job("tells", OMP_NUM_THREADS="7")
    launcher.ends()
    seen = json.loads(launcher.log("workerlog.0").splitlines()[0])
    assert "PSFLEET_STRATEGY" not in seen
    assert seen["OMP_NUM_THREADS"] == "7"


def test_worker_0_is_heard(job: Launch) -> None:
    """Worker 0's output is the job's, stream by stream; the other workers' is in the logs only."""
    launcher = job("tells", *TWO)
    _, out, err = launcher.ends()
    assert [json.loads(line)["PSFLEET_RANK"] for line in out.splitlines()] == ["0"]
    assert err.count("to stderr") == 1
    assert "to stderr" in launcher.log("workerlog.1")


def test_unix_sockets_lie_in_a_private_folder(job: Launch) -> None:
    """The endpoints are sockets in one folder of mode 0700, which is gone afterwards."""
    launcher = job("hangs")
    launcher.until_logged("workerlog.0", "hanging")
    words = Path(f"/proc/{launcher.pid_of('worker', 0)}/environ").read_text().split("\0")
    endpoint = dict(word.partition("=")[::2] for word in words)["PSFLEET_SERVERS"]
    folder = Path(endpoint.removeprefix("unix:")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    launcher.process.terminate()
    launcher.ends()
    assert not folder.exists()


@pytest.mark.parametrize("name", ["long" * 25, "a,b", "a b", "ä", "a%2fb", "a?b#c", ":"])
def test_a_temporary_folder_that_is_none_for_sockets_is_avoided(
    job: Launch, tmp_path: Path, name: str
) -> None:
    """A TMPDIR that is too long for a socket's path, or no part of an endpoint, does not stop a job."""
    odd = tmp_path / name
    odd.mkdir()
    launcher = job("tells", TMPDIR=str(odd))
    assert launcher.ends()[0] == 0
    endpoint = json.loads(launcher.log("workerlog.0").splitlines()[0])["PSFLEET_SERVERS"]
    assert re.fullmatch(r"unix:/tmp/psfleet-\w+/server.0", endpoint)
    assert not any(odd.iterdir())


def test_tcp_servers_choose_their_ports(job: Launch) -> None:
    """With --tcp a server gets port 0, and workers get the endpoint that it has told."""
    launcher = job("tells", "--tcp")
    launcher.ends()
    seen = json.loads(launcher.log("workerlog.0").splitlines()[0])
    assert seen["PSFLEET_SERVERS"] == "127.0.0.1:4711"


def test_the_first_failure_is_the_last_word(job: Launch) -> None:
    """A worker's exception ends the job with its exit code and is told with its place and log."""
    launcher = job("fails@1", *TWO)
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


def test_the_exit_code_is_the_failures(job: Launch) -> None:
    """The job ends with the exit code of the process that failed."""
    assert job("exits_with_3@0", *TWO).ends()[0] == 3


def test_a_killed_worker_is_named(job: Launch) -> None:
    """A worker's end by SIGKILL is told as such; the job's exit code is 128 + 9."""
    code, _, err = job("kills_itself@1", *TWO).ends()
    assert code == 137
    assert "worker 1 failed first: killed by SIGKILL" in err


@pytest.mark.parametrize(("role", "rank"), [("server", 1), ("worker", 0)])
def test_killing_a_process_ends_the_job(job: Launch, role: str, rank: int) -> None:
    """After a server or a worker is killed the job ends and names it."""
    launcher = job("hangs", *TWO)
    launcher.until_logged("workerlog.0", "hanging")
    launcher.until_logged("workerlog.1", "hanging")
    os.kill(launcher.pid_of(role, rank), signal.SIGKILL)
    code, _, err = launcher.ends()
    assert code == 137
    assert f"{role} {rank} failed first: killed by SIGKILL" in err


def test_who_does_not_stop_is_killed(job: Launch) -> None:
    """Processes that ignore SIGTERM are killed after the grace period, and are named."""
    launcher = job("stubborn", *TWO)
    launcher.until_logged("workerlog.0", "hanging")
    launcher.until_logged("workerlog.1", "hanging")
    os.kill(launcher.pid_of("server", 0), signal.SIGKILL)
    code, _, err = launcher.ends()
    assert code == 137
    assert "worker 0, worker 1 had to be killed" in err


def test_a_server_that_fails_to_start(job: Launch) -> None:
    """A server that ends before it is ready is the failure, with the end of its log."""
    code, _, err = job("server-fails").ends()
    assert code == 1
    assert "server 0 failed first: ended before it was ready: no memory for the tables" in err


def test_a_server_that_is_never_ready(job: Launch) -> None:
    """The start has a deadline, and its message says who was not ready."""
    code, _, err = job("server-hangs", "--servers", "2", "--start-timeout", "0.5").ends()
    assert code == 1
    assert "server 0 failed first: was not ready within 0.5 s; nor were server 1" in err


def test_a_server_that_does_not_leave(job: Launch) -> None:
    """A server that outstays the last worker is stopped; the job is a success all the same."""
    assert job("stubborn-server").ends()[0] == 0


@pytest.mark.parametrize("behaviour", ["family@0", "family_succeeds"])
def test_grandchildren_end_too(job: Launch, behaviour: str) -> None:
    """What the script has started ends with the job, even in a session of its own."""
    code = job(behaviour, *TWO).ends()[0]
    assert code == (0 if behaviour == "family_succeeds" else 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_forwarded(job: Launch, number: signal.Signals) -> None:
    """Workers get the launcher's signal and the time to save; the job's exit code is 128 + it."""
    launcher = job("tells_signals", *TWO)
    launcher.until_logged("workerlog.0", "hanging")
    launcher.until_logged("workerlog.1", "hanging")
    launcher.process.send_signal(number)
    code, _, err = launcher.ends()
    assert code == 128 + number
    for rank in (0, 1):
        assert f"got {number.name}\nsaved" in launcher.log(f"workerlog.{rank}")
    assert f"stopped by {number.name}" in err.splitlines()[-1]


def test_a_closed_terminal_leaves_time_to_save(job: Launch) -> None:
    """When the terminal is gone nothing can be shown any more; workers still end in order."""
    ours, terminal = pty.openpty()
    launcher = job("tells_signals", *TWO, terminal=terminal)
    os.close(terminal)
    launcher.until_logged("workerlog.0", "hanging")
    launcher.until_logged("workerlog.1", "hanging")
    os.close(ours)
    launcher.process.send_signal(signal.SIGHUP)
    assert launcher.ends()[0] == 128 + signal.SIGHUP
    for rank in (0, 1):
        assert "saved" in launcher.log(f"workerlog.{rank}")


def test_a_second_signal_kills(job: Launch) -> None:
    """A second Ctrl-C does not wait for the grace period."""
    launcher = job("stubborn", *TWO)
    launcher.until_logged("workerlog.0", "hanging")
    launcher.until_logged("workerlog.1", "hanging")
    began = time.monotonic()
    launcher.process.send_signal(signal.SIGINT)
    time.sleep(0.2)  # two signals at once would be one to the kernel
    launcher.process.send_signal(signal.SIGINT)
    code, _, err = launcher.ends()
    assert code == 130
    assert time.monotonic() - began < 3.5
    assert "had to be killed" in err


def test_ctrl_c_while_servers_start(job: Launch) -> None:
    """Ctrl-C counts before the servers are ready too."""
    launcher = job("server-hangs")
    launcher.until(lambda: len(launcher.family()) == 3, "server beside launcher and guard")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.ends()[0] == 130


def test_nothing_survives_a_killed_launcher(job: Launch) -> None:
    """Even SIGKILL of the launcher takes the whole family with it, and its private folder."""
    launcher = job("family_hangs", *TWO)
    launcher.until_logged("workerlog.0", "hanging")
    launcher.until_logged("workerlog.1", "hanging")
    words = Path(f"/proc/{launcher.pid_of('server', 0)}/environ").read_text().split("\0")
    ready = dict(word.partition("=")[::2] for word in words)["PSFLEET_READY_FILE"]
    launcher.process.kill()
    launcher.ends()
    launcher.until(lambda: not launcher.family(), "end of the family")
    assert not Path(ready).parent.exists()
