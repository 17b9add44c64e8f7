"""The server program: one shard of the tables behind gRPC, and on server 0 the fleet's coordinator.

Start with `process`, the life of a server process. `services` implements the gRPC methods, `engine` runs the
state machines, `coordinator` decides for the whole fleet, `durability` has the log and recovery, and
`snapshots` takes snapshots of the whole fleet.
"""

import os

from psfleet.core.base.settings.declaration import from_variable
from psfleet.core.base.settings.declared_settings import ProcessSettings
from psfleet.core.net.connections import grpc_process

# Only gRPC reports a client that is refused because of its certificate. With TLS its log level is therefore
# INFO, at which a server logs no other lines of gRPC.
grpc_process.prepare(
    "INFO" if from_variable(ProcessSettings, "tls", os.environ) else "NONE"
)  # before any module of this package imports gRPC
