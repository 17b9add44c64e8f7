"""Pulls of a worker after an error."""

import pytest

from psfleet.core.engine.rules import SGD
from psfleet.core.engine.runtime_interface import Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet_worker.tensors.push_queue import FleetPull
from psfleet_worker.tensors.splitting import DenseRead, RoutingPlans


def test_a_pull_without_memory_fails_each_time() -> None:
    """Values that did not fit into memory are not left out when the caller waits again."""
    spec = TableSpec("huge", "dense", (2**50,), SGD())
    pull = FleetPull(
        [], [], [DenseRead(spec, Read(spec.key), RoutingPlans(0))], [[]], lambda _: spec
    )
    for _ in range(2):
        with pytest.raises(MemoryError):
            pull.wait()
