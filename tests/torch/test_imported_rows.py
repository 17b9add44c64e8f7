"""Rows of a PyTorch model become rows of a table on real servers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import psfleet
from psfleet import optimizer
from psfleet.checkpoint import read_rows
from psfleet.client import Client
from psfleet.errors import CheckpointError
from psfleet.settings.environment import Environment
from psfleet.testing.local_fleet import LocalFleet
from psfleet_launch.commands.psfleet_cli import main


def table(client: Client) -> psfleet.client.SparseTable:
    """The one that gets the rows."""
    return client.sparse_table("words", 4, optimizer.Adagrad(0.1))


def test_a_state_dict_warms_a_fleet_up(tmp_path: Path) -> None:
    """Two servers load the snapshot that has them, and train on."""
    model: Any = torch.nn.ModuleDict(
        {"emb": torch.nn.EmbeddingBag(50, 4), "other": torch.nn.Embedding(3, 4)}
    )
    file, start, warm = (str(tmp_path / name) for name in ("model.pt", "start", "warm"))
    torch.save(model.state_dict(), file)
    with psfleet.connect(Environment(None, 0, (), 1)) as client:
        table(client)
        client.save(start)
    command = ["ckpt", "import", start, file, "--table", "words", "--to", warm]
    assert main(command) == 2  # two tensors may be meant
    assert main([*command, "--name", "emb.weight"]) == 0
    weights = model["emb"].weight.detach().numpy()
    with (
        LocalFleet(2, 1, in_process=True) as fleet,
        psfleet.connect(fleet.environment(0), mode="sync") as client,
    ):
        words = table(client)
        client.load(warm)
        assert words.pull(np.arange(50)).tobytes() == weights.tobytes()
        words.push([7], np.ones((1, 4))).wait(60)
        assert np.all(words.pull([7]) < weights[7])


def test_ids_and_half_precision(tmp_path: Path) -> None:
    """State dicts of psfleet's modules have ids; bfloat16 becomes float32; nothing is unpickled."""
    half = torch.ones(2, 4, dtype=torch.bfloat16) / 3
    file = str(tmp_path / "model.pt")
    torch.save({"tables.u.ids": torch.tensor([9, -1]), "tables.u.weight": half}, file)
    rows = read_rows(file)
    assert rows.ids.tolist() == [9, -1]
    assert rows.value.tobytes() == half.float().numpy().tobytes()
    torch.save({"weight": half, "code": print}, file)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_rows(file)
