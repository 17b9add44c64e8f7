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
THREADS: dict[str, tuple[str, ...]] = {
    "liveness": (),  # of a server, from its start on
    "following": ("--replicas", "1"),  # of a standby
    "pushes": ("--mode", "async"),  # of a worker
}
"""By name, with what a job needs to have it."""

ELSEWHERE = {
    "psfleet/core/base/threads.py",  # makes them
    "psfleet/core/engine/tables/arena.py",  # makes pages in advance; without it they are made at first use
    "psfleet/fleet/testing/local_fleet.py",  # for tests
}


def calls(*names: str) -> Iterator[str]:
    """Files with calls of these names in the code of servers and workers."""
    for folder in ("psfleet", "server", "worker"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            tree = ast.parse(text if any(name in text for name in names) else "")
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in names:
                    yield str(path.relative_to(ROOT))


def test_all_threads_are_made_in_one_way() -> None:
    """All that servers and workers start are service threads, so what holds for some holds for all."""
    assert {*calls("Thread", "Timer", "start_new_thread")} <= ELSEWHERE


@pytest.mark.parametrize("name", THREADS)
def test_a_thread_that_fails_ends_its_process(tmp_path: Path, name: str) -> None:
    """An error that nobody expects: its process says so in one line and ends with code 1."""
    command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
    command += ["--no-progress", "--log-dir", str(tmp_path), *THREADS[name], SCRIPT]
    process = ended(
        command,
        env=ENV | {"PSFLEET_CRASH": f"thread {name}:1:raise", "LOGS_OF_THE_TEST": str(tmp_path)},
    )
    logs = "".join(path.read_text() for path in tmp_path.glob("*/*erlog.*"))
    message = rf" CRITICAL \w+\.\d psfleet: thread '{name}' has failed, and process \d+ ends: "
    error = f"SimulatedFault: PSFLEET_CRASH is thread {name}"
    assert re.search(message + error, logs), logs + process.stderr
    if name != "following":  # another process takes a standby's place
        assert "code 1" in process.stderr, process.stderr
