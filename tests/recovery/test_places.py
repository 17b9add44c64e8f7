"""A fleet at one of its limits: workers that come are let in, or hear why they are not."""

from functools import partial
from typing import Literal

import pytest

from psfleet.core.base.errors import DeadlineExceeded, PsfleetError, ServerUnavailable
from psfleet.core.base.settings.environment import Environment
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.channel import open_channel
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from psfleet_worker.session.retry_policy import Patience
from tests.trainings import in_threads


def test_a_worker_registers_although_all_places_are_taken() -> None:
    """Two of two calls that may wait do so at a barrier, for a worker that is only coming."""
    with LocalFleet(1, 3, limits="waiting_calls=2", in_process=True) as fleet:
        early = [ClusterRuntime(fleet.environment(worker), "async") for worker in range(2)]

        def meet(runtime: ClusterRuntime) -> None:
            runtime.barrier()
            runtime.close()

        def come() -> None:
            ClusterRuntime(fleet.environment(2), "async").close()

        in_threads([*(partial(meet, runtime) for runtime in early), come])
        assert fleet.wait() == [0]


def refusal(environment: Environment) -> PsfleetError:
    """Why a worker cannot come; a connection that is still being made at the end tells nothing."""
    while True:
        try:
            ClusterRuntime(environment, "async", patience=Patience(start=2.0))
        except DeadlineExceeded:
            continue
        except PsfleetError as error:
            return error


@pytest.mark.parametrize("transport", ["plain tcp", "tcp"])
def test_a_worker_hears_that_a_server_has_too_many_connections(
    transport: Literal["tcp", "plain tcp"],
) -> None:
    """The server closes what it has no place for; the sentence names the setting.

    (Over unix sockets server 0 knows its own address from the start, and might take the place itself.)
    """
    with LocalFleet(1, 1, transport, limits="connections=1", in_process=True) as fleet:
        environment = fleet.environment(0)
        access = Access.of(environment)
        with open_channel(fleet.endpoints[0], access) as channel:
            status = channel.unary_unary("/psfleet.v1.Shard/Status", None, None)
            status(b"", timeout=150, wait_for_ready=True, metadata=access.metadata)
            error = refusal(environment)
        assert isinstance(error, ServerUnavailable)
        assert "it closes connections at once" in str(error)
        assert "raise connections in PSFLEET_LIMITS" in str(error)
