"""The tables of a fleet as one worker knows them: made, and read and set whole."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from psfleet.runtime.interface import TableState
from psfleet.runtime.validation import check_spec_value
from psfleet.schema.table import TableSpec
from psfleet.shard.dense_partition import dense_ranges
from psfleet.shard.server_group import located_as, placed
from psfleet.wire import segments
from psfleet.wire.table_messages import read_spec, write_spec
from psfleet.wire.v1 import shard_pb2
from psfleet.wire.v1.frame_pb2 import Header
from psfleet_worker.connection.call import Call, wait_all
from psfleet_worker.connection.connection import FleetConnection
from psfleet_worker.connection.server_client import ServerClient
from psfleet_worker.sharding.paging import deal_state
from psfleet_worker.sharding.table_reader import TableReader

__all__ = ["WorkerTables"]

Floats = NDArray[np.float32]


class WorkerTables(TableReader):
    """What comes before a call here must have reached the servers; see Stream.flush.

    Args:
        fleet: This worker's connection.
    """

    def __init__(self, fleet: FleetConnection) -> None:
        super().__init__(fleet.clients, f"worker {fleet.worker}")
        self._fleet = fleet
        self._writes = 0  # of this life

    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        """See Runtime.create. The worker that server 0 hears first gives the value everywhere."""
        flat = check_spec_value(spec, value)
        spec = placed(spec, self.specs.values())
        first, *others = self._fleet.clients
        [answer] = wait_all([self._create_on(first, spec, self._parts(spec, flat)[0])])
        reply = shard_pb2.CreateTableReply.FromString(answer)
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
        """Of a table's first value what each server gets."""
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
        """See Runtime.write_table."""
        for parts in deal_state(self.spec(table), state, len(self._fleet.clients)):
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
        """See Runtime.shrink."""
        self._writes += 1
        request = shard_pb2.ShrinkRequest(
            table=table,
            threshold=threshold,
            unseen=unseen,
            worker=self._fleet.worker,
            incarnation=self._fleet.session.incarnation,
            number=self._writes,
        )
        answers = wait_all(
            self._fleet.to_all("Shard/Shrink", request, seconds=self._fleet.patience.wait)
        )
        return sum(shard_pb2.ShrinkReply.FromString(answer).removed for answer in answers)

    def load(self, path: str) -> None:
        """See Runtime.load."""
        from psfleet.checkpoint import read_specs  # loads the tables of servers

        absolute = str(Path(path).absolute())
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
        return self._fleet.header(sequence=self._writes)
