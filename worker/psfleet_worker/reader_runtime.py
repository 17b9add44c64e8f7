"""The tables of a running job, for a process without a seat in it: it reads, and the job does not notice."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ConfigError, ServerUnavailable, UsageError
from psfleet.rules import import_rules
from psfleet.runtime.completed import CompletedPull
from psfleet.runtime.evicted_ids import EvictedIds
from psfleet.runtime.interface import PendingPull, Read, TableState
from psfleet.runtime.read_only import ReadOnlyRuntime
from psfleet.runtime.read_version import ReadVersion
from psfleet.schema.table import TableSpec
from psfleet.settings.environment import Environment
from psfleet.strategy import WireSettings
from psfleet.wire import frame
from psfleet.wire.access import Access
from psfleet.wire.v1 import shard_pb2
from psfleet.wire.v1.frame_pb2 import Header
from psfleet_worker.connection.call import wait_all
from psfleet_worker.connection.request import ServerRequest, SpecOf, Values
from psfleet_worker.connection.server_client import ServerClient
from psfleet_worker.connection.server_stats import figures_of
from psfleet_worker.session.retries import Patience
from psfleet_worker.sharding.pull_splitting import RoutingPlans, deal_read
from psfleet_worker.sharding.table_reader import TableReader
from psfleet_worker.stream.pulls import FleetPull

__all__ = ["ReaderRuntime"]

Floats = NDArray[np.float32]

_OUTAGE = 30.0  # seconds at least in which a server that has died may come back
_ATTEMPTS = 5  # at a pull whose servers are in different rounds


class ReaderRuntime(ReadOnlyRuntime):
    """Implements psfleet.runtime.interface.Runtime without a seat.

    Args:
        environment: Where the servers are, and with what this process proves itself to them.
        wire: In which form values travel.

    Attributes:
        version: What the last pull has read; None: there was none.

    Raises:
        ConfigError: The endpoints are not those of all servers of one job, in their order.
        ServerUnavailable: A server does not answer.
    """

    def __init__(self, environment: Environment, wire: WireSettings | None = None) -> None:
        import_rules(environment.rules, environment.rules_folder)
        self.source = f"the job at {', '.join(environment.servers)}"
        self.instead = "a worker of the job can"
        self.version: ReadVersion | None = None
        self._form = (wire or WireSettings()).values
        patience = Patience.of(environment)
        patience = dataclasses.replace(patience, outage=max(patience.outage, _OUTAGE))
        access, changed = Access.of(environment), threading.Condition()
        self._clients = [
            ServerClient(
                index, endpoint, patience, changed, access=access, transport=environment.transport
            )
            for index, endpoint in enumerate(environment.servers)
        ]
        self._tables = TableReader(self._clients, "this client")
        try:
            self._check_servers()
        except BaseException:
            self.close()
            raise

    def _check_servers(self) -> None:
        """With fewer or other servers, ids would be looked up where they are not."""
        told = [(status.server, status.servers) for status in self._statuses()]
        if told != [(index, len(told)) for index in range(len(told))]:
            raise ConfigError(
                f"the endpoints are those of {', '.join(f'server {i} of {n}' for i, n in told)}; name all "
                "servers of one job, in their order"
            )

    # -- reads ---------------------------------------------------------------------------------

    def open(self, name: str) -> TableSpec:
        """See Runtime.open."""
        with self._said():
            return self._tables.open(name)

    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        """See Runtime.pull. In sync mode of one round, if a few attempts find the servers in the same one."""
        for _ in range(_ATTEMPTS):
            values, self.version = self._pull(reads)
            behind, ahead = self.version.rounds
            if behind == ahead:
                break
        return values

    def _pull(self, reads: Sequence[Read]) -> tuple[list[Floats], ReadVersion]:
        plans = RoutingPlans(len(self._clients))
        dealt = [deal_read(self._tables.spec(read.table), read, plans) for read in reads]
        requests = [_ReadRequest(Header(seatless=True), None, self._form) for _ in self._clients]
        asked = [deal.ask(requests) for deal in dealt]
        with self._said():
            calls = {
                server: client.start(
                    "Shard/Pull", request.request(), cargo=request, small=request.is_small
                )
                for server, (client, request) in enumerate(
                    zip(self._clients, requests, strict=True)
                )
                if request.reads
            }
            values = FleetPull(calls, requests, dealt, asked, self._tables.spec).wait()
        names = [self._tables.spec(read.table).name for read in reads]
        return values, _version([requests[server] for server in calls], names, asked, requests)

    def read_table(self, table: int) -> TableState:
        """See Runtime.read_table. Page by page, beside the training: the pages are of no one moment."""
        with self._said():
            return self._tables.read(table)

    def evictions(self, table: int, position: Sequence[int], limit: int) -> list[EvictedIds]:
        """See Runtime.evictions."""
        with self._said():
            return self._tables.evictions(table, position, limit)

    def stats(self) -> list[dict[str, Any]]:
        """See Runtime.stats."""
        return [figures_of(status) for status in self._statuses()]

    def _statuses(self) -> list[shard_pb2.StatusReply]:
        message = shard_pb2.StatusRequest().SerializeToString()
        with self._said():
            answers = wait_all([client.start("Shard/Status", message) for client in self._clients])
        return [shard_pb2.StatusReply.FromString(answer) for answer in answers]

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except ServerUnavailable as error:
            raise ServerUnavailable(f"{error}; the job has ended, or this server is down") from None

    # -- what a process without a seat is ------------------------------------------------------

    @property
    def worker_index(self) -> int:
        """See Runtime; the first of one reader."""
        return 0

    @property
    def worker_num(self) -> int:
        """See Runtime."""
        return 1

    @property
    def server_num(self) -> int:
        """See Runtime."""
        return len(self._clients)

    @property
    def pools(self) -> bool:
        """See Runtime."""
        return True

    @property
    def reads_ahead(self) -> bool:
        """See Runtime."""
        return False

    def pull_ahead(self, reads: Sequence[Read]) -> PendingPull:
        """See Runtime.pull_ahead."""
        return CompletedPull(self.pull(reads))

    def specs(self) -> dict[int, TableSpec]:
        """See Runtime.specs."""
        return dict(self._tables.specs)

    def flush(self, timeout: float | None = None) -> None:
        """There is nothing to wait for."""

    def barrier(self, timeout: float | None = None) -> NoReturn:
        """Refused: nobody waits for a reader."""
        self._refuse_meeting()

    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        """Refused likewise."""
        self._refuse_meeting()

    def _refuse_meeting(self) -> NoReturn:
        raise UsageError(
            f"this client only reads the tables of {self.source}: it has no seat there and meets no workers, "
            "so leave barriers, reductions and loading to the scripts of the workers"
        )

    def close(self) -> None:
        """Let go of threads and connections. Safe to call twice."""
        for client in self._clients:
            client.close()


class _ReadRequest(ServerRequest):
    """Reads from one server without a seat.

    Attributes:
        round: The last round that was closed there.
        steps: Of each read how many updates its table had there.
    """

    round = 0
    steps: Sequence[int] = ()

    def answer(self, message: bytes, spec_of: SpecOf) -> list[Values]:
        """See ServerRequest.answer."""
        header, _ = frame.decode(message)
        self.round, self.steps = header.round, list(header.steps)
        return super().answer(message, spec_of)


def _version(
    answered: Sequence[_ReadRequest],
    names: Sequence[str],
    asked: Sequence[Sequence[bool]],
    requests: Sequence[_ReadRequest],
) -> ReadVersion:
    """What the servers have said of the reads of tables with these names."""
    rounds = [request.round for request in answered] or [0]
    told = [iter(request.steps) for request in requests]
    steps: dict[str, list[int]] = {}
    for name, has_part in zip(names, asked, strict=True):
        found = [next(told[server]) for server, has in enumerate(has_part) if has]
        steps.setdefault(name, []).extend(found)
    return ReadVersion(
        (min(rounds), max(rounds)),
        {name: (min(found), max(found)) for name, found in steps.items() if found},
    )
