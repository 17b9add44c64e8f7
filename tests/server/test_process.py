"""The program psfleet-server from the outside."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from psfleet.core.base.job_files import read_ready
from tests.programs import PYTHONPATH
from tests.refusals import cases
from tests.waiting import until

ENV = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("PSFLEET_", "PADDLE_"))},
    "PYTHONPATH": PYTHONPATH,
}


def start(*arguments: str, **variables: str) -> "subprocess.Popen[str]":
    """psfleet-server with these arguments."""
    return subprocess.Popen(
        [sys.executable, "-m", "psfleet_server", *arguments],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENV | variables,
    )


@contextlib.contextmanager
def running(folder: Path, *arguments: str, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """A server with its socket in a folder, once it has said that it is ready."""
    with start(*arguments, **variables) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == f"server 0 of 1 ready at unix:{folder}/s (process {process.pid})\n"
            yield process
        finally:
            process.kill()


def one(folder: Path) -> list[str]:
    """Arguments of the only server of one worker."""
    return ["--index", "0", "--servers", f"unix:{folder}/s", "--workers", "1"]


def refused(*arguments: str, **variables: str) -> str:
    """The one line on stderr of a server that does not start, which ends with code 2."""
    with start(*arguments, **variables) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("psfleet-server: ")
    return err


@pytest.fixture
def ready(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A running server."""
    with running(tmp_path, *one(tmp_path), "--ready-file", f"{tmp_path}/ready") as process:
        yield process


def test_a_ready_server_says_where(ready: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """The ready file holds endpoint and process id; the socket is for its owner only."""
    until((tmp_path / "ready").exists, "ready file")
    assert read_ready(tmp_path / "ready") == (f"unix:{tmp_path}/s", ready.pid)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600


def test_a_signal_ends_it_in_order(ready: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """SIGINT, as SIGTERM does below: exit code 0, no message, no socket left."""
    ready.send_signal(signal.SIGINT)
    _, err = ready.communicate(timeout=60)
    assert (ready.returncode, err) == (0, "")
    assert not (tmp_path / "s").exists()


def test_a_socket_in_use_is_refused(ready: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """A second server on the same socket ends with one sentence, and the first goes on."""
    assert "another server listens there" in refused(*one(tmp_path))
    assert ready.poll() is None
    assert (tmp_path / "s").exists()


def test_the_socket_of_a_dead_server_is_taken_over(tmp_path: Path) -> None:
    """A socket file that nobody listens on does not keep a server from starting."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/s")
    with running(tmp_path, *one(tmp_path)) as process:
        process.terminate()
        assert process.wait(60) == 0


def test_a_port_in_use_is_refused() -> None:
    """One sentence with the address and the reason."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        err = refused("--index", "0", "--servers", f"127.0.0.1:{port}", "--workers", "1")
    assert f"cannot listen on '127.0.0.1:{port}': Address already in use" in err


WRONG = f"""
--workers 1  # PSFLEET_SERVERS is empty
--servers , --workers 1  # PSFLEET_SERVERS is empty
--servers here --workers 1  # endpoint 'here' is neither unix:/path nor host:port
--servers here:² --workers 1  # endpoint 'here:²' is neither unix:/path nor host:port
--servers here:9000/ --workers 1  # endpoint 'here:9000/' is neither
--servers here:0/9000 --workers 1  # endpoint 'here:0/9000' is neither
--servers here:9000/0 --workers 1  # endpoint 'here:9000/0' is neither
--servers here:64000 --workers 1  # leaves no port for tensors, 2000 above; choose a lower one, or name both
--servers unix:/tmp/x --workers 0  # PSFLEET_WORKERS is 0; it must be at least 1
--servers unix:/tmp/x --workers two  # PSFLEET_WORKERS is 'two'
--servers unix:/tmp/x --workers 1 --index 1  # PSFLEET_RANK is 1
--servers unix:/nowhere/x --workers 1  # its folder does not exist
--servers unix:/tmp/{"x" * 120} --workers 1  # the limit is 107
--servers unix:HERE/s --workers 1 --load /nowhere  # does not exist, so it holds no manifest"""


@pytest.mark.parametrize(("line", "sentence"), cases(WRONG))
def test_what_cannot_be_meant_is_one_sentence(tmp_path: Path, line: str, sentence: str) -> None:
    """Bad arguments end with code 2 and say what is wrong; no socket is left."""
    assert sentence in refused("--index", "0", *line.replace("HERE", str(tmp_path)).split())
    assert not list(tmp_path.iterdir())


def test_the_environment_says_the_same(tmp_path: Path) -> None:
    """Without arguments the server reads PSFLEET_*, or the reference's names."""
    own = {
        "PADDLE_PSERVERS_IP_PORT_LIST": f"unix:{tmp_path}/s",
        "PADDLE_TRAINERS_NUM": "1",
        "PSFLEET_RANK": "0",
    }
    with running(tmp_path, **own) as process:
        process.terminate()
        assert process.wait(60) == 0
