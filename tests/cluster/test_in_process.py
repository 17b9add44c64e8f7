"""Servers of a LocalFleet as threads of this process, and the check of its end."""

import gc
import os
import signal
import subprocess
import weakref
from pathlib import Path

import pytest

from psfleet.core.base.errors import ServerUnavailable, UsageError
from psfleet.core.client import Client
from psfleet.fleet.testing import server_thread
from psfleet.fleet.testing.local_fleet import LocalFleet


def test_what_a_block_leaves_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker or a pipe that is still open at the end of the block is named; an error inside comes first."""
    monkeypatch.setattr(server_thread, "_CLOSE_TIMEOUT", 0.0)
    clients: list[Client] = []
    pipes: list[int] = []
    fleet = LocalFleet(1, 1, in_process=True)

    def connect_inside() -> None:
        with fleet:
            clients.append(Client(fleet.connect(0, "async")))

    def open_inside(error: Exception | None = None) -> None:
        with LocalFleet(1, 1, in_process=True):
            pipes.extend(os.pipe())
            if error is not None:
                raise error

    with pytest.raises(UsageError, match=r"left .*'heartbeats'.*; close what was opened inside"):
        connect_inside()
    clients[0].runtime.abandon()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"left .*file \d+ \(pipe:"):
        open_inside()
    with pytest.raises(KeyError):
        open_inside(KeyError())
    for end in pipes:
        os.close(end)


def test_a_fleet_without_references_ends() -> None:
    """Without a block, too, the threads and the sockets go with the fleet."""
    fleet = LocalFleet(2, 1, in_process=True).start()
    folder = Path(fleet.endpoints[0].removeprefix("unix:")).parent
    threads, gone = [*fleet.processes], weakref.ref(fleet)
    del fleet
    gc.collect()
    assert gone() is None
    assert [thread.poll() for thread in threads] == [0, 0]
    assert not folder.exists()


def test_kill_waits_for_what_it_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """kill() does not wait for the process that reviving() has put in the place of the killed one."""
    fleet = LocalFleet(1, 1)
    process = subprocess.Popen(["sleep", "600"])
    fleet.processes.append(process)

    def kill_and_replace(number: int) -> None:
        os.kill(process.pid, number)
        fleet.processes[0] = None

    monkeypatch.setattr(process, "send_signal", kill_and_replace)
    fleet.kill(0)
    assert process.returncode == -signal.SIGKILL


def test_a_thread_is_not_killed() -> None:
    """kill() says that the server is a thread."""
    with LocalFleet(1, 1, in_process=True) as fleet:
        with pytest.raises(
            UsageError, match=r"server 0 is a thread .* no signal 9; make the Local"
        ):
            fleet.kill(0)
        assert fleet.processes[0].poll() is None
        with pytest.raises(UsageError, match="no signal"):
            fleet.processes[0].send_signal(signal.SIGSTOP)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The error of a server is that of the fleet's start, and its other servers end."""
    with pytest.raises(
        ServerUnavailable, match=r"server 0 ended with code 2: .*nowhere.* no manifest"
    ):
        LocalFleet(2, 1, resume=str(tmp_path / "nowhere"), in_process=True).start()
