"""Which servers hold a table."""

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
    """Its servers have every value once, in their order; the others have none."""
    spec = dataclasses.replace(DENSE, shape=(size,), servers=group, first=first)
    ranges, holders = dense_ranges(spec, servers), servers_of(spec, servers)
    assert holders == [(first + place) % servers for place in range(min(group, servers))]
    ends = [end for server in holders for end in ranges[server]]
    assert ends == sorted(ends)
    assert sum(high - low for low, high in ranges) == size
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


def test_tables_fill_one_server_after_the_other() -> None:
    """A dense model is on as many servers as it fills; sparse groups follow each other."""
    instances: list[TableSpec] = []
    for number, (kind, size, servers) in enumerate(
        [
            ("dense", 64, None),
            ("dense", SHARE - 64, None),
            ("dense", 3 * SHARE, None),
            ("dense", 7, None),
            ("dense", 5, 2),
            ("sparse", 2, 1),
            ("sparse", 2, None),
            ("sparse", 2, 3),
            ("sparse", 2, 1),
        ]
    ):
        spec = TableSpec(f"t{number}", "dense" if kind == "dense" else "sparse", (size,), SGD())
        instances.append(placed(dataclasses.replace(spec, servers=servers), instances))
    assert [(spec.servers, spec.first) for spec in instances] == [
        (1, 0),
        (1, 0),
        (3, 1),
        (1, 4),
        (2, 4),
        (1, 0),
        (None, 0),
        (3, 1),
        (1, 4),
    ]


@pytest.mark.parametrize("servers", [0, -1, 1025])
def test_a_group_has_servers(servers: int) -> None:
    """The refusal names the table and the number."""
    with pytest.raises(ConfigError, match=rf"table 'w': servers is {servers}, .* in \[1, 1024\]"):
        dataclasses.replace(DENSE, servers=servers)
