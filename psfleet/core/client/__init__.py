"""`psfleet.connect()`: a client for scripts that pull and push tables themselves, embedded or on a cluster.

Start with `client.py`: each method of a Client is one request to the runtime of the process.

Uses core.base, core.engine, core.graph, core.runtime, data, initializer, metrics, optimizer, serving.
"""

from psfleet.core.client.client import Client
from psfleet.core.client.client_tables import DenseTable, RowsAhead, SparseTable
from psfleet.core.client.process_client import connect

__all__ = ["Client", "DenseTable", "RowsAhead", "SparseTable", "connect"]
