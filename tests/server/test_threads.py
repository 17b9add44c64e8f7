"""No thread of a server or a worker ends unnoticed: its failure ends the process, in a sentence."""

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import ended

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(Path(__file__).with_name("scripts") / "busy.py")
ENV = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("PSFLEET_", "PADDLE_"))},
    "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "server", "worker", "launch")),
}
LOG = ("--durability", "log", "--snapshot-every", "1h")
PAIR = ("--replicas", "1")
THREADS: dict[str, tuple[str, ...]] = {
    # of a server
    "heartbeats": (),  # of a worker too
    "deadlines": (),
    "connection_limit": ("--tcp",),
    "following": PAIR,
    "http2": (),
    "http2 connection": (),
    "lanes": (),
    "metrics": PAIR,
    "scaling": (),
    "takeover_commands": PAIR,
    "liveness": (),
    "signals": (),
    "snapshot": LOG,
    "snapshot calls": (),
    "snapshot schedule": LOG,
    "snapshots": (),
    "standby": PAIR,
    "ticks": (),
    "trail": LOG,
    "views": (),
    # of a worker
    "evaluation": LOG,
    "mark": (*LOG, "--mode", "async"),
    "merging": ("--mode", "half-async"),
    "pushes": ("--mode", "async"),
    "server 1": (),
}
"""By name, with what a job needs to have it."""

ON_MACHINES = "moved servers"  # only where servers may move to another machine
OF_SERVICES = {"follower", "stopping", "versions"}  # tests/serving
FOR_OTHERS = "http2 sending"  # only where a client does not read; tests/http2/test_slow_readers.py

ELSEWHERE = {
    "psfleet/platform/threads.py",  # makes them
    "psfleet/tables/arena.py",  # makes pages in advance; without it they are made at first use
    "psfleet/testing/local_fleet.py",  # for tests
    "psfleet/testing/training_run.py",
}


def calls(*names: str) -> Iterator[tuple[str, str, ast.Call]]:
    """Calls of these names in the code of servers and workers: the file and the name of each."""
    for folder in ("psfleet", "server", "worker"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if not any(name in text for name in names):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func).split(".")[-1]
                    if name in names:
                        yield str(path.relative_to(ROOT)), name, node


def test_all_threads_are_made_in_one_way() -> None:
    """Servers and workers start threads only in this one way, and each of them is tested here."""
    plain = {file for file, _, _ in calls("Thread", "Timer", "start_new_thread")}
    assert plain <= ELSEWHERE
    names = {ast.unparse(call.args[1]) for _, _, call in calls("ServiceThread")}
    numbered = "f'server {index}'"
    plain_names = {*THREADS, *OF_SERVICES, ON_MACHINES, FOR_OTHERS} - {"server 1"}
    assert names == {*map(repr, plain_names), numbered}


@pytest.mark.parametrize("name", THREADS)
def test_a_thread_that_fails_ends_its_process(tmp_path: Path, name: str) -> None:
    """An error that nobody expects, in any thread: its process says so in one line and ends with code 1."""
    command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
    command += ["--no-progress", "--log-dir", str(tmp_path), *THREADS[name], SCRIPT]
    done = ended(
        command,
        env=ENV
        | {"PSFLEET_BROKEN_THREAD": name, "LOGS_OF_THE_TEST": str(tmp_path)}
        | {"PSFLEET_TRANSPORT": "http2" if name.startswith("http2") else "grpcio"},
    )
    logs = "".join(path.read_text() for path in tmp_path.glob("*/*erlog.*"))
    said = rf" CRITICAL \w+\.\d psfleet: thread '{name}' has failed, and process \d+ ends: ThreadFault: "
    assert re.search(f"{said}a test wants", logs), logs + done.stderr
    if name not in ("following", "metrics", "standby"):  # another process takes a standby's place
        assert "code 1" in done.stderr, done.stderr


def test_the_thread_that_looks_for_moved_servers_ends_its_process(tmp_path: Path) -> None:
    """The same for the thread that no job on one machine has."""
    script = (
        "import pathlib, time, grpc\n"
        "from psfleet.wire.connections.relocating_channel import RelocatingChannel\n"
        f"RelocatingChannel('unix:a', pathlib.Path({str(tmp_path)!r}), grpc.insecure_channel)\n"
        "time.sleep(100)\n"
    )
    done = ended([sys.executable, "-c", script], env=ENV | {"PSFLEET_BROKEN_THREAD": ON_MACHINES})
    assert done.returncode == 1
    assert f"psfleet: thread {ON_MACHINES!r} has failed" in done.stderr
