"""Which servers hold a table, and which of its values or rows."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psfleet.core.base.errors import ConfigError
from psfleet.core.engine.rules.momentum import SGD
from psfleet.core.engine.schema.table import BLOCK, TableSpec
from psfleet.core.engine.shard.table_placement import (
    SHARE,
    dense_ranges,
    owned_rows,
    placed,
    servers_of,
    split_elements,
)

pytestmark = pytest.mark.quick

DENSE = TableSpec("w", "dense", (64,), SGD())
SPARSE = TableSpec("rows", "sparse", (2,), SGD())


@given(
    size=st.integers(0, 40 * BLOCK),
    group=st.integers(1, 12),
    first=st.integers(0, 50),
    servers=st.integers(1, 9),
)
def test_a_group_holds_a_dense_table(size: int, group: int, first: int, servers: int) -> None:
    """Its servers have every value once, in their order, in whole blocks, none more than one block above
    another; the others have none."""
    spec = dataclasses.replace(DENSE, shape=(size,), servers=group, first=first)
    ranges, holders = dense_ranges(spec, servers), servers_of(spec, servers)
    assert holders == [(first + place) % servers for place in range(min(group, servers))]
    ends = [end for server in holders for end in ranges[server]]
    assert ends == sorted(ends)
    assert sum(high - low for low, high in ranges) == size
    assert all(low % BLOCK == 0 for low, high in ranges if low < high)
    counts = [-((low - high) // BLOCK) for low, high in (ranges[server] for server in holders)]
    assert max(counts) - min(counts) <= 1
    for server in set(range(servers)) - set(holders):
        assert ranges[server][0] == ranges[server][1]


@given(group=st.integers(1, 12), first=st.integers(0, 50), servers=st.integers(1, 9))
def test_a_group_holds_a_sparse_table(group: int, first: int, servers: int) -> None:
    """Every id is on one of its servers, and no id on another."""
    spec = dataclasses.replace(SPARSE, servers=group, first=first)
    ids = np.arange(2000)
    owned = np.array([owned_rows(spec, ids, server, servers) for server in range(servers)])
    assert (owned.sum(0) == 1).all()
    assert set(np.flatnonzero(owned.any(1))) == set(servers_of(spec, servers))


@given(places=st.sets(st.integers(0, 10 * BLOCK - 1)), servers=st.integers(1, 5))
def test_elements_go_where_their_values_are(places: set[int], servers: int) -> None:
    """Every position is dealt once, to the server whose range has it."""
    ranges = dense_ranges(dataclasses.replace(DENSE, shape=(10 * BLOCK,)), servers)
    positions = np.array(sorted(places), np.int64)
    dealt = [positions[part] for part in split_elements(positions, ranges)]
    assert sum(len(part) for part in dealt) == len(places)
    for part, (low, high) in zip(dealt, ranges, strict=True):
        assert ((low <= part) & (part < high)).all()


def test_tables_fill_one_server_after_the_other() -> None:
    """A dense model is on as many servers as it fills; sparse groups follow each other."""
    tables: list[TableSpec] = []
    dense = [(64, None), (SHARE - 64, None), (3 * SHARE, None), (7, None), (5, 2)]
    for spec, size, servers in [
        *((DENSE, *one) for one in dense),
        *((SPARSE, 2, servers) for servers in (1, None, 3, 1)),
    ]:
        name = f"t{len(tables)}"
        made = dataclasses.replace(spec, name=name, shape=(size,), servers=servers)
        tables.append(placed(made, tables))
    assert [(table.servers, table.first) for table in tables] == [
        *((1, 0), (1, 0), (3, 1), (1, 4), (2, 4)),
        *((1, 0), (None, 0), (3, 1), (1, 4)),
    ]


@pytest.mark.parametrize("servers", [0, -1, 1025])
def test_a_group_has_servers(servers: int) -> None:
    """The refusal names the table and the number."""
    with pytest.raises(ConfigError, match=rf"table 'w': servers is {servers}, .* in \[1, 1024\]"):
        dataclasses.replace(DENSE, servers=servers)
