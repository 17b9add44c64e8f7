"""A client of several services that share the rows of a job."""

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.hashing import routes, virtual_shards
from psfleet.serving.serving_client import ServingClient


class SplitClient:
    """Rows of services of which each follows one part of the ids, as `psfleet serve --follow JOB --part 2/4`.

    Args:
        addresses: Addresses of gRPC, in the order of the parts.
        tls, timeout: As for ServingClient.
    """

    def __init__(self, addresses: Sequence[str], tls: str = "", timeout: float = 60.0) -> None:
        self._clients = [ServingClient(address, tls, timeout) for address in addresses]
        self._routes = routes(len(addresses))
        self._pool = ThreadPoolExecutor(len(addresses), "parts")

    def look_up(self, table: str, ids: NDArray[np.int64], model: str = "") -> NDArray[np.float32]:
        """The rows of ids, int64 [n]: float32 [n, dim]. Each service is asked for its own, all at once.

        Raises:
            PsfleetError: A service refuses it, or does not answer.
        """
        parts = self._routes[virtual_shards(ids)]
        order = np.argsort(parts, kind="stable")
        ends = np.searchsorted(parts[order], np.arange(len(self._clients) + 1))
        places = [order[low:high] for low, high in itertools.pairwise(ends)]
        calls = [
            self._pool.submit(client.look_up, table, ids[own], model)
            for client, own in zip(self._clients, places, strict=True)
            if len(own) or len(ids) == 0
        ]
        parts_rows = np.concatenate([each.result() for each in calls])
        rows = np.empty_like(parts_rows)
        rows[order] = parts_rows
        return rows

    def part(self, number: int) -> ServingClient:
        """The client of one of the services, from 0."""
        return self._clients[number]

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown()
        for client in self._clients:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
