"""Each process gives metrics that equal its own counters, and a worker only while somebody looks."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from psfleet.core.base.observability.exposition import (
    LatencyHistogram,
    decode,
    encode,
    histogram,
    merge,
)
from psfleet.core.client import Client
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.channel import open_channel
from psfleet.core.net.v1.metrics_pb2 import CollectReply, CollectRequest
from psfleet.core.runtime.strategy import WireSettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.standby.pairs import Pairs
from tests.waiting import until

Samples = dict[tuple[str, str], dict[str, float]]

STEPS = 20
IDS = np.arange(50)


def collect(fleet: LocalFleet) -> Samples:
    """Of each process (role, rank) its samples; labels follow a name in braces."""
    samples: Samples = {}
    access = Access.of(fleet.environment(0))
    for endpoint in fleet.endpoints:
        with open_channel(endpoint, access) as channel:
            call = channel.unary_unary("/psfleet.v1.Metrics/Collect", None, None)
            reply = call(CollectRequest().SerializeToString(), timeout=60, metadata=access.metadata)
        for process in CollectReply.FromString(reply).processes:
            samples[process.role, str(process.rank)] = {
                one.name + "".join(f"{{{value}}}" for value in one.labels.values()): one.value
                for family in decode(process.text)
                for one in family.samples
            }
    return samples


@pytest.fixture(params=["unix", "tcp"])
def fleet(request: pytest.FixtureRequest) -> Iterator[LocalFleet]:
    """Two servers with logs, that keep no snapshot."""
    with LocalFleet(2, 1, request.param, durability="log+fsync", in_process=True) as fleet:
        yield fleet


def test_metrics_equal_the_counters(fleet: LocalFleet) -> None:
    """What server and worker give equals what they count, over unix sockets and TCP with TLS."""
    runtime = fleet.connect(0, "ssp", staleness=2)
    table = Client(runtime).sparse_table("rows", 4, SGD(0.5))
    for step in range(STEPS):
        table.push(IDS, np.full((50, 4), float(step), np.float32))
        table.pull(IDS)
    runtime.flush()
    until(lambda: ("worker", "0") in collect(fleet), "metrics of worker 0")
    actual, counted = collect(fleet), runtime.stats()
    for server, stats in enumerate(counted):
        own = actual["server", str(server)]
        assert own["psfleet_pushes_total"] == stats["pushes"] == STEPS
        assert own["psfleet_samples_total"] == stats["samples"]
        [rows] = stats["tables"]
        assert own["psfleet_table_rows{rows}"] == rows["count"]
        assert own["psfleet_table_bytes{rows}"] == rows["bytes"]
        assert own["psfleet_table_updates_total{rows}"] == STEPS
        assert own["psfleet_received_bytes_total"] == stats["bytes_in"]
        assert own["psfleet_sent_bytes_total"] == stats["bytes_out"]
        kinds = ("push", "pull", "exchange")
        assert sum(own[f"psfleet_{kind}_bytes_total"] for kind in kinds) == stats["bytes_in"]
        # Of each table: all rows but those of ids that no push had named before the first pull.
        assert own["psfleet_pulled_rows_total{rows}"] == STEPS * rows["count"]
        assert own["psfleet_unknown_ids_total{rows}"] == 0
        assert own["psfleet_updated_rows_total{rows}"] == STEPS * rows["count"]
        assert own["psfleet_admitted_rows_total{rows}"] == rows["count"]
        assert own["psfleet_staleness_pushes_count{ssp}"] == STEPS
        assert own["psfleet_push_seconds_count"] == STEPS  # however they travel
        assert own["psfleet_exchange_seconds_count"] > 0
        assert own["psfleet_log_sync_seconds_count"] >= 1
        assert own["psfleet_log_bytes_total"] > STEPS * 16
    worker = actual["worker", "0"]
    assert worker["psfleet_step_seconds_count"] == STEPS - 1
    assert worker["psfleet_retries_total"] == 0
    assert worker["psfleet_nonfinite_pushes_total"] == 0
    times = ("pull", "push", "wait", "script")
    assert all(worker[f"psfleet_worker_{what}_seconds_total"] > 0 for what in times)
    # Of all steps but the last, to which a part may still come.
    norms = [step * np.sqrt(IDS.size * 4) for step in range(STEPS - 1)]
    assert worker["psfleet_gradient_norm_sum{rows}"] == pytest.approx(sum(norms))
    for bound in ("0.25", "64", "128", "+Inf"):
        below = sum(norm < float(bound) for norm in norms)
        assert worker[f"psfleet_gradient_norm_bucket{{{bound}}}{{rows}}"] == below
    assert worker["psfleet_hottest_id_share{rows}"] == pytest.approx(1 / 50)
    assert worker["psfleet_hot_ids_share{rows}"] == 1
    runtime.close()


def test_a_standby_tells_what_it_has_taken() -> None:
    """Its metrics come by its server: all that was sent to it is taken, and its tables are as large."""
    with Pairs(1, 1, durability="log") as fleet:
        fleet.await_standbys()
        runtime = fleet.connect(0, "async")
        table = Client(runtime).sparse_table("rows", 4, SGD(0.5))
        seen: list[dict[str, float]] = []

        def rests() -> bool:
            """Two looks in a row tell the same."""
            actual = collect(fleet)
            standby, server = actual.get(("standby", "0"), {}), actual["server", "0"]
            names = [name for name in standby if "standby" in name]
            seen.append({name: standby[name] for name in names} | {"sent": server[_SENT]})
            return bool(names) and seen[-2:] == [seen[-1]] * 2

        until(rests, "metrics of the standby")
        before = seen[-1]
        for _ in range(STEPS):
            table.push(IDS, np.ones((50, 4), np.float32)).wait()
        server = collect(fleet)["server", "0"]
        until(
            lambda: rests() and seen[-1]["psfleet_standby_table_bytes"] == server[_TABLE],
            lambda: f"a standby that has all: {seen[-1]}",
        )
        grown = {name: value - before[name] for name, value in seen[-1].items()}
        assert grown["psfleet_standby_taken_bytes_total"] == grown["sent"] > STEPS * 50 * 4 * 4
        assert grown["psfleet_standby_taken_records_total"] >= STEPS
        assert server["psfleet_standby_ready"] == 1
        runtime.close()
        fleet.await_end()


_SENT, _TABLE = "psfleet_standby_bytes_total", "psfleet_table_bytes{rows}"


def test_unknown_ids_are_counted() -> None:
    """A pull counts the distinct ids without a row; a push counts the rows that it adds, once."""
    with LocalFleet(1, 1, in_process=True) as fleet:
        runtime = fleet.connect(0, "async")
        table = Client(runtime).sparse_table("rows", 4, SGD(0.5))
        table.pull(np.repeat(IDS, 3))
        table.push(IDS[:20], np.ones((20, 4), np.float32)).wait()
        table.pull(IDS)
        table.push(IDS[:30], np.ones((30, 4), np.float32)).wait()
        own = collect(fleet)["server", "0"]
        counts = {"pulled_rows": 100, "unknown_ids": 80, "updated_rows": 50, "admitted_rows": 30}
        assert {name: own[f"psfleet_{name}_total{{rows}}"] for name in counts} == counts
        runtime.close()


def test_pulls_that_wait_are_counted() -> None:
    """In ssp mode the pull of a worker that is too far ahead counts as one that waited."""
    with LocalFleet(1, 2, in_process=True) as fleet:
        fast, slow = (fleet.connect(worker, "ssp", staleness=0) for worker in (0, 1))
        ahead, behind = (Client(one).sparse_table("rows", 4, SGD(0.5)) for one in (fast, slow))
        ahead.push(IDS, np.ones((50, 4), np.float32)).wait()
        waiting = ThreadPoolExecutor(1)
        values = waiting.submit(ahead.pull, IDS)
        until(lambda: collect(fleet)["server", "0"]["psfleet_waiting_calls"] == 1, "a waiting pull")
        assert collect(fleet)["server", "0"]["psfleet_waited_seconds_count{ssp}"] == 0
        behind.push(IDS, np.ones((50, 4), np.float32)).wait()
        values.result(60)
        waiting.shutdown()
        own = collect(fleet)["server", "0"]
        assert own["psfleet_waited_seconds_count{ssp}"] == 1
        assert 0 < own["psfleet_waited_seconds_sum{ssp}"] <= own["psfleet_pull_seconds_sum"]
        for one in (fast, slow):
            one.close()


def test_saved_bytes_are_those_of_the_other_precision() -> None:
    """With 16 bits on the wire half of the values' bytes are saved, of gradients and of weights."""
    with LocalFleet(1, 1, in_process=True) as fleet:
        runtime = ClusterRuntime(fleet.environment(0), "async", wire=WireSettings("bf16", "bf16"))
        table = Client(runtime).sparse_table("rows", 4, SGD(0.5))
        table.push(IDS, np.ones((50, 4), np.float32)).wait()
        table.pull(IDS)
        until(lambda: ("worker", "0") in collect(fleet), "metrics of worker 0")
        actual = collect(fleet)
        assert actual["worker", "0"]["psfleet_saved_bytes_total"] == 50 * 4 * 2
        assert actual["server", "0"]["psfleet_saved_bytes_total"] == 50 * 4 * 2
        runtime.close()


def test_a_worker_that_nobody_watches_sends_nothing(fleet: LocalFleet) -> None:
    """Before the first look server 0 has no metrics of the worker, however many heartbeats have come."""
    runtime = fleet.connect(0, "async")
    Client(runtime).sparse_table("rows", 4, SGD(0.5)).push(IDS, np.ones((50, 4), np.float32))
    runtime.flush()
    # Not a start-up: heartbeats that bring nothing.
    time.sleep(3 * fleet.environment(0).heartbeat_seconds)
    assert ("worker", "0") not in collect(fleet)
    until(lambda: ("worker", "0") in collect(fleet), "metrics of worker 0")
    runtime.close()


def test_strangers_get_no_metrics(tmp_path: Path) -> None:
    """Over TCP the call needs the job's token, as every other."""
    with LocalFleet(1, 1, "tcp", in_process=True) as fleet:
        access = Access.of(fleet.environment(0))
        with open_channel(fleet.endpoints[0], access) as channel:
            call = channel.unary_unary("/psfleet.v1.Metrics/Collect", None, None)
            with pytest.raises(grpc.RpcError, match="carries no token"):
                call(b"", timeout=60)


def test_a_latency_is_counted_in_its_power_of_two() -> None:
    """A bucket's bound is a power of two of nanoseconds; counts are cumulative, the sum is exact."""
    measured = LatencyHistogram()
    for spent in (1, 2**14 - 1, 2**14, 2**20, 2**40):
        measured.counts[spent.bit_length()] += 1
        measured.total += spent
    buckets = dict(measured.buckets())
    assert buckets["1.6384e-05"] == 2
    assert buckets["3.2768e-05"] == 3
    assert buckets["68.7195"] == 4
    assert buckets["+Inf"] == 5


def test_merged_families_are_those_of_each_process() -> None:
    """Texts of several processes become one, in which each sample keeps its labels."""
    family = histogram("step_seconds", "Help", [("1", 2.0), ("+Inf", 3.0)], 4.5)
    text = encode([family])
    both = merge(
        one for rank in ("0", "1") for one in decode(text, job="j", role="worker", rank=rank)
    )
    assert len(both) == 1
    again = merge(decode(encode(both)))
    assert [(s.name, s.labels, s.value) for s in again[0].samples] == [
        (s.name, s.labels, s.value) for s in both[0].samples
    ]
    assert {s.labels["rank"] for s in both[0].samples} == {"0", "1"}
