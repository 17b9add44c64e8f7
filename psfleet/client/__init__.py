"""Plain tables: push and pull from a script, embedded or on a cluster."""

from psfleet.client.client import Client, connect
from psfleet.client.client_tables import DenseTable, RowsAhead, SparseTable

__all__ = ["Client", "DenseTable", "RowsAhead", "SparseTable", "connect"]
