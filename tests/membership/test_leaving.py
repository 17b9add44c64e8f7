"""In which order servers hear that a worker leaves, and that the members change."""

import threading
import time
from typing import Any

import pytest

from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_server.engine import view_changes
from psfleet_server.engine.shard_host import ShardHost
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.watched_calls import WatchedCalls


def test_server_0_hears_last_of_a_worker_that_leaves() -> None:
    """When server 0 hears it, all others know it. Server 0 may then bring a view that makes others refuse
    the worker's word, and it ends with the last worker."""
    events = []

    def delay(server: int, method: str, _: bytes) -> None:
        if method == "Shard/Leave":
            time.sleep(0.2 * server)

    def record(server: int, method: str, _: bytes) -> None:
        if method == "Shard/Leave":
            events.append(server)

    with LocalFleet(3, 1, in_process=True) as fleet:
        ClusterRuntime(
            fleet.environment(0), "async", inject_faults=WatchedCalls(delay, record)
        ).close()
        assert fleet.wait(60) == [0, 0, 0]
    assert events == [1, 2, 0]


@pytest.mark.parametrize("call", ["freeze", "install"])
def test_a_view_goes_to_all_servers_at_once(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer holds up no call to another: here each answers once all but server 0
    have been called."""
    called = {server: threading.Event() for server in (1, 2)}
    original = getattr(ShardHost, call)

    def wait(host: ShardHost, event: Any) -> Any:
        if host.coordinator is None:
            called[host.shard.index].set()  # perhaps again: a call that fails is repeated
            assert all(other.wait(60) for other in called.values())
        return original(host, event)

    monkeypatch.setattr(view_changes, "_INSTALL_TIMEOUT", 100.0)
    monkeypatch.setattr(ShardHost, call, wait)
    with LocalFleet(3, 1, in_process=True) as fleet:
        ClusterRuntime(fleet.environment(0), "async").close()
        assert fleet.wait(100) == [0, 0, 0]
