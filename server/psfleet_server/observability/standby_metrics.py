"""The metrics of one standby, which it gives its primary when somebody asks."""

from psfleet.observability.exposition import counter, encode, gauge
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.observability.server_metrics import log, process
from psfleet_server.replication.standby import Standby

__all__ = ["standby_metrics"]


def standby_metrics(host: ShardHost, standby: Standby) -> bytes:
    """All families as text. Records may be taken meanwhile.

    Args:
        host: Of the shard that the records fill.
        standby: Takes them.
    """
    held = sum(table.bytes for table in [*host.shard.tables.values()])
    return encode(
        [
            *process(),
            *log(host),
            counter("standby_taken_records", "Records taken, with the copy", standby.records),
            counter("standby_taken_bytes", "Bytes of these records", standby.bytes),
            gauge("standby_table_bytes", "Memory of the tables so far", held),
        ]
    )
