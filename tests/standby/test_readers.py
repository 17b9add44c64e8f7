"""A process that reads a running job without a seat, while a standby takes over."""

import signal

import numpy as np

import psfleet
from psfleet.client import Client
from psfleet.optimizer import Adam
from tests.standby.pairs import Pairs

IDS = np.arange(40)


def test_a_reader_follows_a_takeover() -> None:
    """It goes on with the same values, and then with those of pushes that only the standby has got."""
    with Pairs(2, 1) as fleet:
        fleet.await_standbys()
        with fleet.deciding(), Client(fleet.connect(0, "sync")) as ps:
            users = ps.sparse_table("users", 3, Adam(0.1))
            users.push(IDS, np.ones((40, 3)))
            before = users.pull(IDS).tobytes()
            with psfleet.connect(job=fleet.endpoints) as reader:
                table = reader.sparse_table("users")
                assert table.pull(IDS).tobytes() == before
                fleet.process(1).send_signal(signal.SIGKILL)
                assert table.pull(IDS).tobytes() == before
                users.push(IDS, np.ones((40, 3)))
                after = users.pull(IDS).tobytes()
                assert table.pull(IDS).tobytes() == after != before
            assert fleet.takeovers == 1
