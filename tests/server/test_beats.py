"""Liveness signals: they come, they are answered, and they end with whoever gives them."""

import threading
from pathlib import Path

from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.net.v1.membership_pb2 import HeartbeatReply
from psfleet_server.coordinator.coordinator_messages import WorkerRequests
from psfleet_server.process import Server
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.waiting import until

# After five of these a worker counts as dead, which no busy machine reaches.
_HEARTBEAT_SECONDS = 1.0


def environment(folder: Path, role: str, rank: int, servers: int = 1) -> Environment:
    """Of one process of a fleet of some servers and one worker."""
    endpoints = tuple(f"unix:{folder}/{server}" for server in range(servers))
    return Environment(role, rank, endpoints, 1, dead_after=5 * _HEARTBEAT_SECONDS)  # type: ignore[arg-type]  # a role


def test_a_heartbeat_is_answered_with_what_is_wanted(tmp_path: Path) -> None:
    """A worker hears of a snapshot, and says which step it has started."""
    with Server(environment(tmp_path, "server", 0)) as server:
        coordinator = server.host.coordinator
        assert coordinator is not None
        runtime = ClusterRuntime(environment(tmp_path, "worker", 0), "async")
        replies: list[HeartbeatReply] = []
        runtime._fleet.heartbeats.listeners.append(replies.append)
        until(lambda: replies)
        assert not replies[0].HasField("snapshot")
        coordinator.worker_requests = WorkerRequests((3, 4))
        runtime.push([]).wait()
        until(lambda: replies[-1].HasField("snapshot"))
        assert (replies[-1].snapshot.number, replies[-1].snapshot.view) == (3, 4)
        until(lambda: coordinator.heartbeats[False, 0][0].step == 1)
        runtime.close()
        assert "heartbeats" not in {
            thread.name for thread in threading.enumerate() if not thread.daemon
        }


def test_heartbeats_go_on_at_another_endpoint_of_server_0(tmp_path: Path) -> None:
    """Of a standby that has taken its place, say, which workers learn with another number of servers."""
    with Server(environment(tmp_path, "server", 0)) as server:
        coordinator = server.host.coordinator
        assert coordinator is not None
        runtime = ClusterRuntime(environment(tmp_path, "worker", 0), "async")
        fleet, moved = runtime._fleet, f"unix:{tmp_path}/moved"
        for present, other in zip(addresses_of(server.endpoint), addresses_of(moved), strict=True):
            Path(other.removeprefix("unix:")).symlink_to(present.removeprefix("unix:"))
        fleet._move_to([moved])
        runtime.push([]).wait()
        fleet.heartbeats.send_now()
        assert coordinator.heartbeats[False, 0][0].step == 1
        runtime.close()


def test_servers_send_heartbeats_too(tmp_path: Path) -> None:
    """Server 0 hears of the process that server 1 is, and of the one after it."""
    with Server(environment(tmp_path, "server", 0, 2)) as first:
        coordinator = first.host.coordinator
        assert coordinator is not None
        boots = set()
        for count in (1, 2):
            with Server(environment(tmp_path, "server", 1, 2)):
                until(
                    lambda: (
                        (actual := coordinator.heartbeats.get((True, 1)))
                        and actual[0].boot not in boots
                    )
                )
            boots.add(coordinator.heartbeats[True, 1][0].boot)
            assert len(boots) == count
