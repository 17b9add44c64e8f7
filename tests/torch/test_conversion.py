"""convert(): the loss curve of single-process torch, embedded and on a fleet; rows of its state dicts."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import psfleet
import psfleet.torch as pst
from psfleet import optimizer
from psfleet.checkpoint import read_rows
from psfleet.core.base.errors import CheckpointError, ShapeError
from psfleet.core.base.settings.environment import Environment
from psfleet.core.client import Client
from psfleet.core.runtime.modes.switch import connect
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_launch.commands.psfleet_cli import main
from tests.leaks import nothing_left
from tests.torch.models import MODELS, OPTIMIZERS, DeepFM, batches, curve
from tests.torch.test_tied import KINDS, Tied


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        *(("deepfm", "adam"), ("deepfm", "momentum"), ("bags", "adagrad"), ("bags", "adamw")),
        *(("sequence", "sgd"), ("sequence", "adam")),
    ],
)
def test_curve_of_torch(model: str, optimizer: str) -> None:
    """100 losses of a converted model are those of the same model in plain torch; so are its weights."""
    torch.manual_seed(3)
    plain = MODELS[model]()
    begin = copy.deepcopy(plain.state_dict())
    twin = copy.deepcopy(plain)
    data = list(batches(100))
    if optimizer == "momentum":
        # torch keeps the velocity of a sparse gradient as a sum of all gradients so far, whose float32
        # rounding alone takes it 1.1e-5 away from float64; psfleet stays within 5e-7 of that.
        plain = plain.double()
        reference = [
            {k: v.double() if v.is_floating_point() else v for k, v in b.items()} for b in data
        ]
        expected = curve(plain, OPTIMIZERS[optimizer](plain), reference)
    else:
        expected = curve(plain, OPTIMIZERS[optimizer](plain), data)
    moved, opt = pst.convert(twin, OPTIMIZERS[optimizer](twin))
    actual = curve(moved, [opt], data)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    for name, value in moved.state_dict().items():
        np.testing.assert_allclose(value, plain.state_dict()[name], rtol=1e-3, atol=1e-4)
        assert not np.array_equal(value, begin[name])


def test_fleet_has_the_same_bits() -> None:
    """On servers of their own, in sync mode, all losses are those of the embedded run, bit for bit."""
    pairs = [("deepfm", "adam"), ("bags", "adagrad"), ("sequence", "sgd"), ("sequence", "adamw")]
    cases: list[Any] = [(name, MODELS[model], OPTIMIZERS[name]) for model, name in pairs]
    cases += [("tied", partial(Tied, sparse=True), KINDS["adam"])]
    data = list(batches(20))
    with nothing_left(), LocalFleet(2, 1, in_process=True) as fleet:
        remote = fleet.connect(0, "sync")
        for name, make, optimizers in cases:
            curves = []
            for runtime in (None, remote):
                torch.manual_seed(3)
                model = make()
                moved, opt = pst.convert(model, optimizers(model), name=name, runtime=runtime)
                curves.append(curve(moved, [opt], pst.prefetch(data) if runtime else data))
            assert curves[0] == curves[1], name
        remote.close()


@pytest.mark.parametrize("mode", ["sync", "async", "ssp", "geo", "half-async"])
def test_autocast_in_every_mode(mode: Any) -> None:
    """With prefetch one worker has the losses of plain torch under autocast, and not those of
    float32."""
    half = torch.autocast("cpu", torch.bfloat16)
    torch.manual_seed(4)
    start = DeepFM()
    plain, exact = copy.deepcopy(start), copy.deepcopy(start)
    expected = curve(half(lambda batch: plain(batch)), OPTIMIZERS["sgd"](plain), batches(12))
    float32 = curve(exact, OPTIMIZERS["sgd"](exact), batches(1))
    with nothing_left(), LocalFleet(1, 1, in_process=True) as fleet:
        runtime = connect(fleet.environment(0), ConsistencySettings(mode=mode))
        model, opt = pst.convert(start, OPTIMIZERS["sgd"](start), runtime=runtime)
        actual = []
        for batch in pst.prefetch(batches(12)):
            actual += curve(half(lambda batch: model(batch)), [opt], [batch])
            if mode == "half-async":  # where the machine decides how far the server is behind
                runtime.flush()
        assert model.get_parameter("mlp.0.weight").dtype == torch.float32
        runtime.close()
    assert actual[0] == expected[0] != float32[0]
    np.testing.assert_allclose(actual, expected, rtol=0.05 if mode == "half-async" else 0.01)


SGD = torch.optim.SGD


def test_what_is_converted() -> None:
    """Shared modules stay shared, a model may be an embedding, and untrained parts stay torch's."""
    shared = torch.nn.Embedding(5, 3, sparse=True)
    frozen = torch.nn.Embedding(5, 3, sparse=True)
    model = torch.nn.ModuleList([shared, shared, frozen, torch.nn.Embedding(5, 3)])
    moved, _ = pst.convert(model, SGD([*shared.parameters(), *model[3].parameters()], 0.1))
    assert moved[0] is moved[1]
    assert isinstance(moved[0], pst.Embedding)
    assert moved[2] is frozen
    assert type(moved[3]) is torch.nn.Embedding
    alone = torch.nn.Embedding(5, 3, sparse=True)
    weight = alone.weight.detach().clone()
    bare, _ = pst.convert(alone, SGD(alone.parameters(), 0.1))
    assert torch.equal(bare(torch.arange(5)), weight)


def test_large_dense_embeddings_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """One line names an embedding with many rows and dense gradients; not one that is small, sparse, frozen
    or tied to a layer that needs all rows."""
    for _ in range(2):
        model = torch.nn.ModuleDict(
            {
                "large": torch.nn.Embedding(10_000, 2),
                "small": torch.nn.Embedding(100, 2),
                "rows": torch.nn.Embedding(10_000, 2, sparse=True),
                "frozen": torch.nn.Embedding(10_000, 2).requires_grad_(False),
                "tied": torch.nn.Embedding(10_000, 2),
                "head": torch.nn.Linear(2, 10_000),
            }
        )
        model["head"].weight = model["tied"].weight
        pst.convert(model, SGD(model.parameters(), 0.1))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("psfleet: embedding 'large.weight' has 10,000 rows and dense gradients")
    assert "sparse=True" in line


def test_weight_without_memory() -> None:
    """A weight on the device "meta" starts from the standard normal distribution."""
    table = torch.nn.Embedding(10**9, 8, sparse=True, device="meta")
    moved, _ = pst.convert(table, torch.optim.SparseAdam(table.parameters()))
    rows = moved(torch.arange(0, 10**9, 10**6)).detach()
    assert abs(float(rows.mean())) < 0.05
    assert abs(float(rows.std()) - 1) < 0.05


def test_state_dict_goes_both_ways() -> None:
    """A converted model's state dict is plain torch's, and loading one sets rows and dense values."""
    torch.manual_seed(1)
    plain, other = MODELS["bags"](), MODELS["bags"]()
    expected = copy.deepcopy(plain.state_dict())
    moved, opt = pst.convert(plain, OPTIMIZERS["sgd"](plain))
    assert moved.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in moved.state_dict().items())
    moved.load_state_dict(other.state_dict())
    data = list(batches(5))
    actual = curve(moved, [opt], data)
    np.testing.assert_allclose(actual, curve(other, OPTIMIZERS["sgd"](other), data), rtol=1e-5)
    with pytest.raises(ShapeError, match=r"\(3, 6\) under 'mean.weight'"):
        moved.load_state_dict({"mean.weight": torch.zeros(3, 6)}, strict=False)


def table(client: Client) -> psfleet.core.client.SparseTable:
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
    with pytest.raises(CheckpointError, match="is no file of torch, or has more than tensors"):
        read_rows(file)
