"""A trained model gets other features: `psfleet ckpt migrate` of snapshots of real servers."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import optimizer
from psfleet.core.client import Client
from psfleet.core.engine.kernels.initial_values import initial_rows
from psfleet.core.engine.runtime_interface import TableState
from psfleet.features import Feature, FeatureSet, Table, find_features
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.initializer import Normal
from psfleet_launch.commands.psfleet_cli import main
from tests.trainings import in_threads

WORKERS, STEPS = 2, 4
FILE = """
[tables.x]
dim = 4
optimizer = { kind = "Ftrl", learning_rate = 0.1 }

[tables.y]
dim = 16
optimizer = { kind = "Adam", learning_rate = 0.01 }
initializer = { kind = "Normal", scale = 0.5, seed = 7 }

[tables.rest]
dim = 3
optimizer = { kind = "Adagrad", learning_rate = 0.1 }

[features.x]
table = "x"
[features.y]
table = "y"
[features.rest]
table = "rest"
"""
START = Normal(scale=0.5, seed=7)
OLD = FeatureSet(
    [
        Feature("y", Table("y", 8, optimizer.Adam(0.01), START)),
        Feature("z", Table("z", 2, optimizer.SGD(0.1))),
        Feature("rest", Table("rest", 3, optimizer.Adagrad(0.1))),
    ]
)


class Model:
    """The tables of a client; gradients depend on the rows, but on no column of y beyond the eighth."""

    def __init__(self, client: Client, features: FeatureSet) -> None:
        self.client = client
        self.features = client.features(features)
        self.bias = client.dense_table("bias", np.ones(5), optimizer.Adam(0.05))

    def train(self, first: int) -> None:
        """The steps from `first` on."""
        for step in range(first, first + STEPS):
            place = self.client.worker_index, step
            given = {
                name: np.random.default_rng((*place, *name.encode())).integers(0, 40, 20)
                for name in self.features.tables
            }
            batch = self.features.batch(given)
            rows = self.client.pull({**batch.ids, self.bias: None})
            gradients = {name: value - 1 for name, value in batch.pool(rows).items()}
            gradients["y"][:, 8:] = 0
            self.client.push({**batch.gradients(gradients), self.bias: rows[self.bias] - 3})

    def state(self) -> dict[str, TableState]:
        """All tables by name, optimizer state included."""
        tables: list[Any] = [*self.features.tables.values(), self.bias]
        read = self.client.runtime.read_table
        return {table.spec.name: read(table.spec.key) for table in tables}


def run(
    features: FeatureSet, servers: int, first: int = 0, resume: str = "", save: str = ""
) -> list[dict[str, TableState]]:
    """The tables of a sync fleet before and after these steps."""
    states: list[dict[str, TableState]] = []

    def work(client: Client) -> None:
        model = Model(client, features)
        for trains in (False, True):
            client.barrier()
            if trains:
                model.train(first)
            client.barrier()
            if client.worker_index == 0:
                states.append(model.state())
        if save:
            client.save(save)
        client.barrier()

    with (
        LocalFleet(servers, WORKERS, resume=resume, in_process=True) as fleet,
        contextlib.ExitStack() as stack,
    ):
        clients = [
            stack.enter_context(psfleet.connect(fleet.environment(worker), mode="sync"))
            for worker in range(WORKERS)
        ]
        in_threads([partial(work, client) for client in clients])
    return states


def bits(state: TableState, columns: int | None = None) -> tuple[bytes, ...]:
    """Ids, values and state of the first columns, the step."""
    ids = b"" if state.ids is None else state.ids.tobytes()
    parts = [np.ascontiguousarray(part[..., :columns]).tobytes() for part in state.values]
    return (ids, *parts, str(state.step).encode())


def test_migrate_and_train_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A snapshot of two servers migrates, and one and three servers go on from it, to the same bits.

    Rows that stay have their bits and state, of a wider table in its old columns. These then learn what
    they learn without the migration, because the rules go by element.
    """
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    toml = tmp_path / "features.toml"
    toml.write_text(FILE)
    _, trained = run(OLD, 2, save=source)
    command = ["ckpt", "migrate", source, "--features", str(toml), "--to", target, "--yes"]
    assert main(command) == 0
    output = capsys.readouterr().out.splitlines()
    count = {name: len(state.values[0]) for name, state in trained.items()}
    assert sorted(output[:5]) == [
        "add x: 4 wide, ftrl; 0 rows",
        f"drop z: 2 wide; {count['z']} rows",
        "keep bias: 5 values; shape 5",
        f"keep rest: {count['rest']} rows",
        f"widen y: {count['y']} rows; from 8 to 16 wide",
    ]
    assert main(["ckpt", "verify", target]) == 0
    _, unmigrated = run(OLD, 2, STEPS, source)
    new, actual = find_features(str(toml)), []
    for servers in (1, 3):
        before, after = run(new, servers, STEPS, target)
        for name in ("rest", "bias"):
            assert bits(before[name]) == bits(trained[name]), name
            assert bits(after[name]) == bits(unmigrated[name]), name
        assert bits(before["y"], 8) == bits(trained["y"], 8)
        assert bits(after["y"], 8) == bits(unmigrated["y"], 8)
        y = before["y"]
        assert y.ids is not None
        fresh = initial_rows(y.ids, 16, START.resolve((None, 16)), 7, "y")
        assert y.values[0][:, 8:].tobytes() == fresh[:, 8:].tobytes()
        assert not any(np.any(slot[:, 8:]) for slot in y.values[1:])
        assert before["x"].step == 0
        assert len(after["x"].values[0])
        actual.append(after)
    assert {n: bits(s) for n, s in actual[0].items()} == {n: bits(s) for n, s in actual[1].items()}
