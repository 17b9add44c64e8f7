"""The server program: a shard behind gRPC."""

import os

from psfleet.core.base.settings.declaration import from_variable
from psfleet.core.base.settings.declared_settings import ProcessSettings
from psfleet.core.net.connections import grpc_process

# Who is turned away because of a certificate learns it from gRPC alone, and so does the log: it is
# the only kind of line that gRPC has at this level in a server's incarnation.
grpc_process.prepare(
    "INFO" if from_variable(ProcessSettings, "tls", os.environ) else "NONE"
)  # before any module of this package imports gRPC
