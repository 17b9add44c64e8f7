"""Leak checks and a small training run for the tests of the cluster."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def children() -> set[str]:
    """Process ids of this process's children, zombies included."""
    listed: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            listed.update((task / "children").read_text().split())
    return listed


def leftovers(threads: set[threading.Thread], processes: set[str]) -> str:
    """What is there now and was not there before."""
    return f"{set(threading.enumerate()) - threads or ''}{children() - processes or ''}"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every thread and child process of a test has ended when it is over."""
    threads, processes = set(threading.enumerate()), children()
    yield
    deadline = time.monotonic() + 5
    while (left := leftovers(threads, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
