"""Traces of pushes: what a collector gets from the processes of a fleet."""

import dataclasses
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider

from psfleet.client import Client
from psfleet.errors import ConfigError
from psfleet.observability.tracing import open_tracing
from psfleet.optimizer import SGD
from psfleet.settings.environment import Environment, read_environment
from psfleet.settings.mode import Mode
from psfleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.observability.collector import collecting

IDS = np.arange(50)
STEPS = 5


def train(environment: Environment, mode: Mode) -> None:
    """Push and pull STEPS times; the servers of one worker end after it."""
    runtime = ClusterRuntime(environment, mode)
    table = Client(runtime).sparse_table("rows", 4, SGD(0.5))
    for step in range(STEPS):
        table.push(IDS, np.full((50, 4), float(step), np.float32))
        table.pull(IDS)
    runtime.close()


@pytest.mark.parametrize(
    ("transport", "mode", "network"),
    [("http2", "async", "unix"), ("grpcio", "async", "tcp"), ("http2", "sync", "tcp")],
)
def test_a_trace_joins_worker_server_and_log(
    transport: str, mode: Mode, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each push is one trace: push, a call to each server, the server, and its log, parents in this order."""
    with collecting() as collector:
        monkeypatch.setenv("PSFLEET_TRACE", collector.url)
        with LocalFleet(2, 1, network, durability="log+fsync") as fleet:
            here = dataclasses.replace(
                fleet.environment(0), trace=collector.url, transport=transport
            )
            train(here, mode)
            assert fleet.wait() == [0, 0]
        pushes = [span for _, span in collector.spans if not span.parent_span_id]
        assert len(pushes) == len({push.trace_id for push in pushes}) == STEPS
        for push in pushes:
            check(collector.under, push)
        assert len(collector.spans) == sum(size(collector.under, push) for push in pushes)


def check(under, push: Span) -> None:
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


def size(under, span: Span) -> int:
    """How many spans a trace has from this one on."""
    return 1 + sum(size(under, child) for _, child in under(span))
