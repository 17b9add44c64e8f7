"""Plain tables: push and pull from a script, embedded or on a cluster."""

from psfleet.client.client import Client, DenseTable, RowsAhead, SparseTable, connect

__all__ = ["Client", "DenseTable", "RowsAhead", "SparseTable", "connect"]
