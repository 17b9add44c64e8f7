"""A snapshot of the whole fleet, asked for by this worker; server 0 leads it."""

from psfleet.settings.kinds import place_or_url
from psfleet.wire.v1 import snapshot_pb2
from psfleet_worker.connection.call import wait_all
from psfleet_worker.connection.connection import FleetConnection


def save(fleet: FleetConnection, path: str, *, delta: bool, base: bool) -> str:
    """Write every table to a folder, which appears whole or not at all; returns where it lies.

    Args:
        fleet: This worker's connection; the others go on training.
        path: The folder; empty: where the job keeps its snapshots.
        delta: Only what has changed since the last base or delta.
        base: The next delta holds the changes since this snapshot.
    """
    request = snapshot_pb2.TakeRequest(
        path=place_or_url(path) if path else "", kind="delta" if delta else "full", base=base
    )
    call = fleet.clients[0].start(
        "SnapshotCoordinator/Take", request.SerializeToString(), seconds=fleet.patience.wait
    )
    return snapshot_pb2.TakeReply.FromString(wait_all([call])[0]).path
