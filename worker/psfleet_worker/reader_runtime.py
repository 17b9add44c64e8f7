"""ReaderRuntime: a read-only runtime for a process outside a running job.

`psfleet.connect(job=...)` and followers use it. A reader is not a worker of the job, so no worker ever waits
for it. If a server does not reply for as long as a restart may take, the reader raises ServerUnavailable.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import ConfigError, ServerUnavailable, UsageError
from psfleet.core.base.settings.environment import Environment
from psfleet.core.engine.eviction_records import EvictedIds
from psfleet.core.engine.rules import import_rules
from psfleet.core.engine.runtime_interface import Read, ReadVersion, TableState
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net import frame
from psfleet.core.net.body import parse
from psfleet.core.net.connections.access import Access
from psfleet.core.net.table_messages import read_reply
from psfleet.core.net.v1 import shard_pb2
from psfleet.core.net.v1.follower_pb2 import ChangesReply, ChangesRequest, RowsReply, RowsRequest
from psfleet.core.net.v1.frame_pb2 import Header
from psfleet.core.runtime.runtime_bases import ReadOnlyRuntime
from psfleet.core.runtime.strategy import WireSettings
from psfleet_worker.connection.call import wait_all
from psfleet_worker.connection.request import ServerRequest, SpecOf, Values
from psfleet_worker.connection.server_client import ServerClient, figures_of
from psfleet_worker.session.retry_policy import Patience
from psfleet_worker.tensors.push_queue import FleetPull
from psfleet_worker.tensors.splitting import SPLIT_READS, RoutingPlans
from psfleet_worker.tensors.whole_tables import TableReader

Floats = NDArray[np.float32]

_OUTAGE = 30.0  # least seconds to wait for a server that has died and may come back
_LONGEST_WAIT = 1.0  # seconds for which a follower waits for a round, or for a server that has died
_ATTEMPTS = 5  # attempts to find all servers in the same round; the last one is used as it is


class ReaderRuntime(ReadOnlyRuntime):
    """Read-only runtime on the servers of a running job. This process is not one of the job's workers.

    Args:
        environment: Endpoints of the servers, and the credentials of this process.
        wire: Compression of pulled values, or None for float32.

    Raises:
        ConfigError: The endpoints are not all servers of one job, in their order.
        ServerUnavailable: A server does not reply.
    """

    pools = True

    def __init__(self, environment: Environment, wire: WireSettings | None = None) -> None:
        import_rules(environment.rules, environment.rules_folder)
        source = f"the job at {', '.join(environment.servers)}"
        super().__init__(source, "a worker of the job can")
        self._version: ReadVersion | None = None
        self._form = (wire or WireSettings()).values
        patience = Patience.of(environment)
        patience = dataclasses.replace(patience, outage=max(patience.outage, _OUTAGE))
        access, condition = Access.of(environment), threading.Condition()
        self._clients = [
            ServerClient(index, endpoint, patience, condition, access=access)
            for index, endpoint in enumerate(environment.servers)
        ]
        self.server_num = len(self._clients)
        self._tables = TableReader(self._clients, "this client")
        try:
            self._check_servers()
        except BaseException:
            self.close()
            raise

    def _check_servers(self) -> None:
        """Raise ConfigError unless the endpoints are all servers of one job, in order.

        In a wrong order, ids would be looked up on the wrong server.
        """
        numbers = [(status.server, status.servers) for status in self._statuses()]
        if numbers != [(index, len(numbers)) for index in range(len(numbers))]:
            raise ConfigError(
                f"the endpoints are those of {', '.join(f'server {i} of {n}' for i, n in numbers)}; name all "
                "servers of one job, in their order"
            )

    @override
    def open(self, name: str) -> TableSpec:
        with self._said():
            return self._tables.open(name)

    @override
    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        """Return the values of the reads.

        In sync mode all values are from the same round if one of five attempts finds all servers in the same
        round.
        """
        for _ in range(_ATTEMPTS):
            values, self._version = self._pull(reads)
            behind, ahead = self._version.rounds
            if behind == ahead:
                break
        return values

    @property
    @override
    def version(self) -> ReadVersion | None:
        return self._version

    def _pull(self, reads: Sequence[Read]) -> tuple[list[Floats], ReadVersion]:
        self._clients[0].check_process()
        plans = RoutingPlans(len(self._clients))
        spec_of = self._tables.spec
        specs = [spec_of(read.table) for read in reads]
        split_reads = [
            SPLIT_READS[spec.kind](spec, read, plans)
            for spec, read in zip(specs, reads, strict=True)
        ]
        requests = [_ReadRequest(Header(seatless=True), None, self._form) for _ in self._clients]
        masks = [split.ask(requests) for split in split_reads]
        with self._said():
            servers = [server for server, request in enumerate(requests) if request.reads]
            for server in servers:
                self._clients[server].send(requests[server], "Shard/Pull")
            values = FleetPull(requests, servers, split_reads, masks, spec_of).wait()
        # Replies contain the job's number of servers. If it has changed, rows have moved, and these values
        # may come from servers that no longer hold the ids.
        names, queries = [spec.name for spec in specs], [requests[server] for server in servers]
        self._check_number({request.servers for request in queries})
        return values, _version(queries, names, masks, requests)

    def _check_number(self, counts: Iterable[int]) -> None:
        """Raise ServerUnavailable if the job's number of servers has changed, because ids have then moved."""
        for servers in counts:
            if servers not in (0, len(self._clients)):
                raise ServerUnavailable(
                    f"{self.source} has {servers} servers by now, and this process knows "
                    f"{len(self._clients)}; connect again, with the folder of the job's logs"
                )

    @override
    def read_table(self, table: int) -> TableState:
        """Return the whole content of a table.

        The table is read page by page while the job trains, so a later page may contain newer values.
        """
        with self._said():
            state = self._tables.read(table)
        self._check_number(status.servers for status in self._statuses())
        return state

    @override
    def evictions(self, table: int, position: Sequence[int], limit: int) -> list[EvictedIds]:
        with self._said():
            return self._tables.evictions(table, position, limit)

    @override
    def stats(self) -> list[dict[str, Any]]:
        return [figures_of(status) for status in self._statuses()]

    def _statuses(self) -> list[shard_pb2.StatusReply]:
        message = shard_pb2.StatusRequest().SerializeToString()
        with self._said():
            replies = wait_all([client.start("Shard/Status", message) for client in self._clients])
        return [shard_pb2.StatusReply.FromString(reply) for reply in replies]

    def read_changes(self, requests: Sequence[ChangesRequest | None]) -> list[ChangesReply]:
        """Request the changes of tables. Returns the replies, one for each request that is not None.

        Args:
            requests: One request per server (psfleet.serving.follower_state_machine makes them), or None to
                skip that server.
        """
        calls = [
            client.start(
                "Followers/ReadChanges",
                request.SerializeToString(),
                seconds=_LONGEST_WAIT,
                outage=_LONGEST_WAIT,
            )
            for client, request in zip(self._clients, requests, strict=True)
            if request is not None
        ]
        replies = [read_reply(reply) for reply in wait_all(calls)]
        self._check_number(reply.servers for reply in replies)
        return replies

    def read_rows(self, server: int, request: RowsRequest) -> RowsReply:
        """Request a page of rows from one server."""
        message = request.SerializeToString()
        [reply] = wait_all([self._clients[server].start("Followers/ReadRows", message)])
        return parse(RowsReply, reply)

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except ServerUnavailable as error:
            raise ServerUnavailable(f"{error}; the job has ended, or this server is down") from None

    @override
    def specs(self) -> dict[int, TableSpec]:
        return dict(self._tables.specs)

    @override
    def barrier(self, timeout: float | None = None) -> NoReturn:
        self._refuse_collective()

    @override
    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NoReturn:
        self._refuse_collective()

    def _refuse_collective(self) -> NoReturn:
        raise UsageError(
            f"this client only reads the tables of {self.source}: it has no seat there and meets no workers, "
            "so leave barriers, reductions and loading to the scripts of the workers"
        )

    @override
    def close(self) -> None:
        for client in self._clients:
            client.close()


class _ReadRequest(ServerRequest):
    """Reads from one server, by a process that is not a worker.

    Attributes:
        servers: Number of servers of the job, as this server knows it.
        round: Last round that this server has closed.
        steps: For each read, number of updates of its table on this server.
    """

    round = servers = 0
    steps: Sequence[int] = ()

    @override
    def values_of(self, message: bytes, spec_of: SpecOf) -> list[Values]:
        """Return the values in a reply, and keep their version (`round`, `steps`, `servers`)."""
        header, _ = frame.decode(message)
        self.round, self.steps = header.round, list(header.steps)
        self.servers = header.servers
        return super().values_of(message, spec_of)


def _version(
    queries: Sequence[_ReadRequest],
    names: Sequence[str],
    masks: Sequence[Sequence[bool]],
    requests: Sequence[_ReadRequest],
) -> ReadVersion:
    """Combine the rounds and steps in all servers' replies into one version: lowest and highest of each."""
    rounds = [request.round for request in queries] or [0]
    counts = [iter(request.steps) for request in requests]
    steps: dict[str, list[int]] = {}
    for name, has_part in zip(names, masks, strict=True):
        numbers = [next(counts[server]) for server, has in enumerate(has_part) if has]
        steps.setdefault(name, []).extend(numbers)
    return ReadVersion(
        (min(rounds), max(rounds)),
        {name: (min(numbers), max(numbers)) for name, numbers in steps.items() if numbers},
    )
