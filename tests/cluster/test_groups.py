"""Tables on some of the servers: a worker calls only those that it needs, and nothing else changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.client import Client
from psfleet.core.engine.shard.table_placement import SHARE, servers_of
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import Adam

STEPS = 5
IDS = np.arange(-20, 20)


def tables(client: Client) -> dict[str, Any]:
    """A small dense table and a large one, rows on one server, on two, and on all."""
    dice, adam = np.random.default_rng(2), Adam(0.1)
    tables_by_name: dict[str, Any] = {
        "bias": client.dense_table("bias", dice.standard_normal(64), adam),
        "wide": client.dense_table("wide", dice.standard_normal(SHARE + 7), adam),
    }
    for servers in (1, 2, None):
        name = f"rows {servers}"
        tables_by_name[name] = client.sparse_table(name, 3, adam, servers=servers)
    return tables_by_name


def train(client: Client, tables_by_name: dict[str, Any], names: list[str]) -> None:
    """Steps whose gradients depend on what is pulled."""
    chosen = [tables_by_name[name] for name in names]
    for _ in range(STEPS):
        pulled = client.pull({one: None if one.spec.kind == "dense" else IDS for one in chosen})
        slopes = {one: values * np.float32(0.5) + 1 for one, values in pulled.items()}
        client.push(
            {
                one: slope if one.spec.kind == "dense" else (IDS, slope)
                for one, slope in slopes.items()
            }
        )
    client.flush()


def bits(tables_by_name: dict[str, Any]) -> dict[str, bytes]:
    """The values of all tables."""
    return {
        name: (table.pull() if table.spec.kind == "dense" else table.pull(IDS)).tobytes()
        for name, table in tables_by_name.items()
    }


def pushes(client: Client) -> list[int]:
    """By server how many it has got."""
    return [server["pushes"] for server in client.stats()]


def trained(servers: int, mode: Mode, folder: Path) -> tuple[dict[str, bytes], list[int]]:
    """The bits after some steps of one worker, which are saved, and the pushes of each server."""
    with (
        LocalFleet(servers, 1, in_process=True) as fleet,
        psfleet.connect(fleet.environment(0), mode=mode) as client,
    ):
        made = tables(client)
        train(client, made, [*made])
        train(client, made, ["bias", "rows 1"])
        client.runtime.save(str(folder))
        return bits(made), pushes(client)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bits of a fleet of one server."""
    return trained(1, "sync", tmp_path_factory.mktemp("alone") / "saved")[0]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_push_goes_where_its_tables_are(
    mode: Mode, alone: dict[str, bytes], tmp_path: Path
) -> None:
    """Groups change no bit. Async: who holds nothing of a push does not get it; sync: every server has each
    round. What is saved goes on in fleets of other sizes, with the same bits."""
    actual, got = trained(4, mode, tmp_path / "saved")
    assert actual == alone
    assert got == ([2 * STEPS] * 4 if mode == "sync" else [2 * STEPS, STEPS, STEPS, STEPS])
    for servers in (1, 3):
        with (
            LocalFleet(servers, 1, in_process=True) as fleet,
            psfleet.connect(fleet.environment(0)) as client,
        ):
            client.runtime.load(str(tmp_path / "saved"))
            assert bits(tables(client)) == alone


def test_a_table_stays_where_it_was_made(alone: dict[str, bytes], tmp_path: Path) -> None:
    """Another definition, by a second worker or of a checkpoint that is loaded, does not move it."""
    trained(2, "sync", tmp_path / "saved")
    with (
        LocalFleet(3, 2, in_process=True) as fleet,
        psfleet.connect(fleet.environment(0)) as one,
        psfleet.connect(fleet.environment(1)) as other,
    ):
        one.sparse_table("rows 1", 3, Adam(0.1), servers=3)
        made = tables(other)
        spec = other.runtime.specs()[made["rows 1"].spec.key]
        assert servers_of(spec, 3) == [0, 1, 2]
        other.runtime.load(str(tmp_path / "saved"))
        assert bits(made) == alone
        assert one.sparse_table("rows 1", 3, Adam(0.1)).pull(IDS).tobytes() == alone["rows 1"]
        spec = other.runtime.specs()[made["rows 1"].spec.key]
        assert servers_of(spec, 3) == [0, 1, 2]
