"""What a client without the token sends is read slowly, whatever it is.

PSFLEET_TORTURE trains a worker under each flood of twenty connections, and prints its steps per second.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime, load_runtime
from psfleet.core.net.http2 import frames
from psfleet.core.net.http2.calls import RateLimit
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.http2.calls import SETTINGS, connected, only, serving
from tests.http2.floods import FLOODS, flood
from tests.http2.raw_connection import GRPC, headers, message, talking
from tests.trainings import zero_rows

pytestmark = pytest.mark.long

TORTURE = "PSFLEET_TORTURE" in os.environ
LIMITS = replace(
    SETTINGS, handshakes=100, connections=100, handshake=2.0, refuse=only("Bearer right")
)
TOKEN = ("authorization", "Bearer right")
PING = frames.frame(frames.PING, 0, 0, b"are you?")
ROWS = zero_rows("rows", 4)
IDS = np.arange(8)
STEPS = 300


def test_frames_beyond_the_first_come_slowly() -> None:
    """64 at once, then 32 in a second; headers and long frames cost more; what was not used is lost."""
    limit = RateLimit(0.0)
    assert [limit.take(0, False, 0.0) for _ in range(64)] == [0.0] * 64
    assert limit.take(0, False, 0.0) == 1 / 32
    assert limit.take(0, False, 1.0) == 0.0
    assert limit.take(640, True, 1000.0) == 0.0
    assert limit.take(52 * 64 << 10, False, 1000.0) == 0.0
    assert limit.take(0, False, 1000.0) == 1 / 32


def test_no_flood_is_read_without_the_token(tmp_path: Path) -> None:
    """Of 1,000 turns the last is not read before the connection ends; calls of members are answered."""
    with (
        serving(tmp_path, LIMITS) as path,
        ThreadPoolExecutor(len(FLOODS)) as pool,
        contextlib.ExitStack() as stack,
    ):
        clients = [stack.enter_context(talking(path)) for _ in FLOODS]
        member = stack.enter_context(connected(path, (TOKEN,)))
        for name, client in zip(FLOODS, clients, strict=True):
            pool.submit(client.send, flood(name, 1000), PING)
        for client in clients:
            assert member.call("/test.Echo/Echo", b"on", 30) == b"on"
            while (actual := client.read()) is not None:
                assert actual[0] != frames.PING or actual[3] != b"are you?", "the flood was read"


def test_a_member_is_not_read_slowly(tmp_path: Path) -> None:
    """After a call with the token all frames are read as they come."""
    with serving(tmp_path, LIMITS) as path, talking(path) as client:
        client.send(headers(1, (*GRPC, TOKEN)), message(1), flood("PRIORITY", 10_000))
        client.ping()


@contextlib.contextmanager
def flooding(endpoint: str, folder: Path, name: str) -> Iterator[None]:
    """A process that floods the server with 20 connections."""
    host, _, port = endpoint.rpartition(":")
    command = [sys.executable, "-m", "tests.http2.floods", host, port, str(folder), name, "20"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"flooding\n"
            yield
        finally:
            process.stdin.close()


def train(runtime: Runtime, steps: int) -> float:
    """Push and pull; steps per second."""
    began = time.monotonic()
    for _ in range(steps):
        runtime.push([Gradient(ROWS.key, np.ones((8, 4), np.float32), IDS, 1.0)])
        runtime.pull([Read(ROWS.key, IDS)])
    return steps / (time.monotonic() - began)


@pytest.mark.parametrize("name", FLOODS if TORTURE else ["empty CONTINUATION"])
def test_a_worker_trains_under_a_flood(name: str) -> None:
    """Each step counts once, and the strangers never take the server down."""
    with LocalFleet(1, 1, "tcp", in_process=True) as fleet:
        environment = replace(fleet.environment(0), lane="inline")
        runtime = load_runtime("cluster", environment, "async")
        runtime.create(ROWS)
        before = train(runtime, STEPS)
        with flooding(addresses_of(fleet.endpoints[0]).tensors, Path(environment.tls), name):
            under = train(runtime, STEPS)
        runtime.flush(60.0)
        (rows,) = runtime.pull([Read(ROWS.key, IDS)])
        assert rows[0][0] == -2.0 * STEPS
        print(f"{name}: {before:.0f} steps/s, {under:.0f} under the flood")
        runtime.close()
