"""How many rows one server's part of a table may have."""

import pytest

from psfleet.entry import CapacityEntry
from psfleet.kernels.hashing import VIRTUAL_SHARDS, routes
from psfleet.rules.adam import Adam
from psfleet.schema.table import TableSpec
from psfleet.tables.row_memory import RowLimits


@pytest.mark.parametrize("servers", [1, 3, 12, 100, 1024])
def test_a_full_table_fits_on_any_number_of_servers(servers: int) -> None:
    """The server with most virtual shards may hold its share of a full table; pushes keep the limit."""
    rows = 10_000_000
    spec = TableSpec("t", "sparse", (16,), Adam(), entry=CapacityEntry(rows=rows))
    limits = RowLimits.of(spec, 48, servers, 2**31)
    most = max((routes(servers) == group).sum() for group in range(servers))
    assert limits.held >= rows * most / VIRTUAL_SHARDS
    assert rows <= limits.pushed * servers < rows + servers


def test_without_an_entry_memory_alone_limits() -> None:
    """A table without a capacity has the places that the server has."""
    assert RowLimits.of(TableSpec("t", "sparse", (16,), Adam()), 48, 7, 1000) == (1000, 1000)
