"""Traces of pushes: what a collector gets from the processes of a fleet."""

import dataclasses
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider

from psfleet.core.base.errors import ConfigError, ServerUnavailable
from psfleet.core.base.observability.trace_setup import open_tracing
from psfleet.core.base.settings.environment import Environment, read_environment
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.client import Client
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD
from psfleet_worker.cluster_runtime import ClusterRuntime
from psfleet_worker.session.retry_policy import Patience
from tests.observability.collector import collecting
from tests.programs import ended
from tests.standby.pairs import Pairs

Children = Callable[[Span], list[tuple[str, Span]]]

IDS = np.arange(50)
GRADIENTS = np.ones((50, 4), np.float32)
STEPS = 5


def train(environment: Environment, mode: Mode, steps: int = STEPS) -> None:
    """Push and pull; the servers of one worker end after it."""
    runtime = ClusterRuntime(environment, mode)
    table = Client(runtime).sparse_table("rows", 4, SGD(0.5))
    for _ in range(steps):
        table.push(IDS, GRADIENTS)
        table.pull(IDS)
    runtime.close()


SILENT = """
import atexit, socket
from psfleet.core.base.observability.trace_setup import open_tracing
from psfleet.core.base.settings.environment import Environment

silent = socket.create_server(("127.0.0.1", 0))
url = f"http://127.0.0.1:{silent.getsockname()[1]}"
tracing = open_tracing(Environment(trace=url))
tracing.tracer.start_span("push").end()
atexit.register(tracing.close)
"""


@pytest.mark.timeout(300)
def test_a_silent_collector_does_not_hold_up_the_end() -> None:
    """A process that traces ends after seconds, however long its exporter would wait for an answer."""
    waits = {"OTEL_EXPORTER_OTLP_TIMEOUT": "600", "PYTHONPATH": os.pathsep.join(sys.path)}
    began = time.monotonic()
    process = ended([sys.executable, "-c", SILENT], env={**os.environ, **waits})
    assert process.returncode == 0, process.stderr
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(("mode", "network"), [("async", "unix"), ("sync", "tcp")])
def test_a_trace_joins_worker_server_and_log(
    mode: Mode, network: Literal["unix", "tcp"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each push is one trace: push, a call to each server, the server, and its log, parents in this order."""
    with collecting() as collector:
        monkeypatch.setenv("PSFLEET_TRACE", collector.url)
        with LocalFleet(2, 1, network, durability="log+fsync") as fleet:
            here = dataclasses.replace(fleet.environment(0), trace=collector.url)
            train(here, mode)
            assert fleet.wait() == [0, 0]
        pushes = [span for _, span in collector.spans if not span.parent_span_id]
        assert len(pushes) == len({push.trace_id for push in pushes}) == STEPS
        for push in pushes:
            check(collector.under, push)
        assert len(collector.spans) == sum(size(collector.under, push) for push in pushes)


def check(under: Children, push: Span) -> None:
    """The spans below a push are those of two servers with logs."""
    assert push.name == "push"
    calls = under(push)
    assert [process for process, _ in calls] == ["psfleet-worker 0"] * 2
    reached = []
    for _, call in calls:
        assert call.kind == Span.SPAN_KIND_CLIENT
        assert call.name in ("psfleet.v1.Shard/Push", "psfleet.v1.Shard/Exchange")
        [(server, served)] = under(call)
        reached.append(server)
        assert (served.name, served.kind) == (call.name, Span.SPAN_KIND_SERVER)
        kept = under(served)
        assert {process for process, _ in kept} == {server}
        counts = Counter(span.name for _, span in kept)
        assert counts["log push"] == 1
        assert set(counts) <= {"log push", "log close", "log sync"}
    assert sorted(reached) == ["psfleet-server 0", "psfleet-server 1"]


def size(under: Children, span: Span) -> int:
    """How many spans a trace has from this one on."""
    return 1 + sum(size(under, child) for _, child in under(span))


def test_the_wait_for_a_standby_is_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push whose answer waits for the standby says for how long, within the span of its server."""
    with collecting() as collector:
        monkeypatch.setenv("PSFLEET_TRACE", collector.url)
        with Pairs(1, 1) as fleet:
            fleet.await_standbys()
            train(dataclasses.replace(fleet.environment(0), trace=collector.url), "async", 20)
            fleet.await_end()
        waits = [span for _, span in collector.spans if span.name == "standby"]
        serves = {
            span.span_id: span for _, span in collector.spans if span.kind == Span.SPAN_KIND_SERVER
        }
        assert waits
        assert all(wait.parent_span_id in serves for wait in waits)


def test_a_push_that_fails_is_a_failed_trace() -> None:
    """The call to a dead server fails, and the push with it. A current span of the script is the parent."""
    ours = TracerProvider(shutdown_on_exit=False).get_tracer("script")
    with collecting() as collector, LocalFleet(1, 1) as fleet:
        here = dataclasses.replace(fleet.environment(0), trace=collector.url)
        runtime = ClusterRuntime(here, "async", patience=Patience(outage=0.1))
        table = Client(runtime).sparse_table("rows", 4, SGD(0.5))
        table.push(IDS, GRADIENTS).wait()
        fleet.kill(0)
        with ours.start_as_current_span("step") as step, pytest.raises(ServerUnavailable):
            table.push(IDS, GRADIENTS).wait()
        runtime.abandon()
        context = step.get_span_context()
        [push] = [
            span
            for _, span in collector.spans
            if span.parent_span_id == context.span_id.to_bytes(8)
        ]
        assert push.trace_id == context.trace_id.to_bytes(16)
        [(_, call)] = collector.under(push)
        assert call.name == "psfleet.v1.Shard/Push"
        assert push.status.code == call.status.code == Status.STATUS_CODE_ERROR
        assert "server 0" in push.status.message


def test_what_is_not_sampled_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's sampler decides for the servers too."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with collecting() as collector:
        monkeypatch.setenv("PSFLEET_TRACE", collector.url)
        with LocalFleet(1, 1, durability="log") as fleet:
            train(dataclasses.replace(fleet.environment(0), trace=collector.url), "async")
            assert fleet.wait() == [0]
        assert not collector.spans


def test_nothing_is_loaded_unless_asked() -> None:
    """Servers and workers that do not trace load no OpenTelemetry."""
    assert open_tracing(Environment()) is None
    program = (
        "import sys, psfleet_server.process, psfleet_worker.cluster_runtime; "
        "print(*(name for name in sys.modules if name.startswith('opentelemetry')))"
    )
    process = ended([sys.executable, "-c", program], check=True)
    assert not process.stdout.strip()


def test_what_is_missing_or_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says what to install, or what an address looks like."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(
        ConfigError,
        match=r"--trace http://h:1 needs OpenTelemetry, .*; run: pip install '\.\[trace\]'",
    ):
        open_tracing(Environment(trace="http://h:1"))
    fleet = {"PSFLEET_ROLE": "worker", "PSFLEET_SERVERS": "h:2"}
    assert read_environment({**fleet, "PSFLEET_TRACE": "https://h/p/"}).trace == "https://h/p"
    for wrong in ("h:4317", "grpc://h:4317", "http://", "http://h/?a=1"):
        with pytest.raises(
            ConfigError, match=r"PSFLEET_TRACE is '.*'; it must be like http://127\.0\.0\.1:4318"
        ):
            read_environment({**fleet, "PSFLEET_TRACE": wrong})
