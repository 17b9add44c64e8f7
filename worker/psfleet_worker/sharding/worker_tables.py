"""The tables of a fleet as one worker knows them: made, and read and set whole."""

import numpy as np
from numpy.typing import NDArray

from psfleet.runtime.interface import TableState
from psfleet.runtime.validation import check_spec_value
from psfleet.schema.table import TableSpec
from psfleet.settings.kinds import place_or_url
from psfleet.shard.table_placement import dense_ranges, located_as, placed
from psfleet.wire import segments
from psfleet.wire.table_messages import read_spec, write_spec
from psfleet.wire.v1 import shard_pb2
from psfleet.wire.v1.frame_pb2 import Header
from psfleet_worker.connection.call import Call, wait_all
from psfleet_worker.connection.connection import FleetConnection
from psfleet_worker.connection.server_client import ServerClient
from psfleet_worker.sharding.paging import split_state
from psfleet_worker.sharding.table_reader import TableReader

Floats = NDArray[np.float32]


class WorkerTables(TableReader):
    """Whole tables on the servers. Earlier pushes must have reached the servers; see Stream.flush."""

    def __init__(self, fleet: FleetConnection) -> None:
        super().__init__(fleet.clients, f"worker {fleet.worker}")
        self._fleet = fleet
        self._writes = 0  # of this incarnation

    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        """Create a table. The value of the worker that reaches server 0 first holds everywhere."""
        flat = check_spec_value(spec, value)
        spec = placed(spec, self.specs.values())
        first, *others = self._fleet.clients
        [response] = wait_all([self._create_on(first, spec, self._parts(spec, flat)[0])])
        reply = shard_pb2.CreateTableReply.FromString(response)
        if reply.HasField("spec"):
            spec = located_as(read_spec(reply.spec), spec)
        wait_all(
            [
                self._create_on(client, spec, part if reply.created else part[:0])
                for client, part in zip(others, self._parts(spec, flat)[1:], strict=True)
            ]
        )
        self.specs[spec.key] = spec
        return spec.key

    def _parts(self, spec: TableSpec, flat: Floats) -> list[Floats]:
        """Split a table's first value by server."""
        servers = len(self._fleet.clients)
        if spec.kind == "sparse":
            return [flat] * servers
        return [flat[low:high] for low, high in dense_ranges(spec, servers)]

    def _create_on(self, client: ServerClient, spec: TableSpec, part: Floats) -> Call:
        request = shard_pb2.CreateTableRequest(
            spec=write_spec(spec),
            value=part.tobytes(),
            worker=self._fleet.worker,
            incarnation=self._fleet.session.incarnation,
        )
        return client.start(
            "Shard/CreateTable", request.SerializeToString(), outage=self._fleet.patience.start
        )

    def write(self, table: int, state: TableState) -> None:
        """Replace the whole content of a table."""
        for parts in split_state(self.spec(table), state, len(self._fleet.clients)):
            self._writes += 1
            wait_all(
                [
                    client.start("Shard/WriteState", segments.message(self._header(), [part]))
                    for client, part in zip(self._fleet.clients, parts, strict=True)
                ]
            )

    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> int:
        """Remove rows that are worth little or not in use; return their number."""
        self._writes += 1
        request = shard_pb2.ShrinkRequest(
            table=table,
            threshold=threshold,
            unseen=unseen,
            worker=self._fleet.worker,
            incarnation=self._fleet.session.incarnation,
            number=self._writes,
        )
        replies = wait_all(
            self._fleet.to_all("Shard/Shrink", request, seconds=self._fleet.patience.wait)
        )
        return sum(shard_pb2.ShrinkReply.FromString(response).removed for response in replies)

    def load(self, path: str) -> None:
        """Load all tables from a snapshot."""
        from psfleet.checkpoint import read_specs  # loads the tables of servers

        absolute = place_or_url(path)
        specs = read_specs(absolute)
        wait_all(
            self._fleet.to_all(
                "Shard/Load",
                shard_pb2.LoadRequest(path=absolute),
                seconds=self._fleet.patience.wait,
            )
        )
        for spec in specs:  # a table that was there before has stayed where it was
            self.open(spec.name)

    def _header(self) -> Header:
        """A header of its own for each message, which adds its segments to it."""
        return self._fleet.header(sequence=self._writes)
