"""Plain tables: push and pull from a script, embedded or on a cluster."""

from psfleet.core.client.client import Client
from psfleet.core.client.client_tables import DenseTable, RowsAhead, SparseTable
from psfleet.core.client.process_client import connect

__all__ = ["Client", "DenseTable", "RowsAhead", "SparseTable", "connect"]
