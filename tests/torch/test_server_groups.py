"""`servers=` of PyTorch's embeddings."""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

import copy

import pytest

from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.errors import ConfigError
from psfleet.features import Feature, FeatureSet, Table
from psfleet.runtime import interface
from psfleet.testing.local_fleet import LocalFleet

pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")

import torch  # after the check for torch

import psfleet.torch as pst
from tests.torch import models  # noqa: F401  # sets torch's threads


def model(servers: int | None) -> torch.nn.ModuleDict:
    """An embedding, a bag and features."""
    features = FeatureSet([Feature("f", Table("features", 4, servers=servers))])
    return torch.nn.ModuleDict(
        {
            "one": pst.Embedding(None, 4, name="one", servers=servers),
            "bag": pst.EmbeddingBag(20, 4, name="bag", servers=servers),
            "features": pst.FeatureEmbedding(features),
        }
    )


def trained(mode: str, servers: int | None) -> tuple[bytes, list[int]]:
    """Rows after some steps on three servers, and the pushes of each."""
    ids = torch.arange(6)
    with LocalFleet(3, 1) as fleet:
        runtime = fleet.connect(0, mode)
        before = interface.use(runtime)
        made = copy.deepcopy(model(servers))
        opt = pst.DistributedOptimizer(made, torch.optim.SGD(made.parameters(), 0.1))
        for _ in range(3):
            out = made["one"](ids).square().mean() + made["bag"](ids.reshape(2, 3)).square().mean()
            (out + (made["features"]({"f": ids})["f"] - 1).square().mean()).backward()
            opt.step()
            opt.zero_grad()
        rows = [made["one"](ids), made["bag"](ids.reshape(2, 3)), made["features"]({"f": ids})["f"]]
        found = b"".join(each.detach().numpy().tobytes() for each in rows)
        pushes = [server["pushes"] for server in runtime.stats()]
        interface.use(before)
        runtime.close()
    return found, pushes


def test_embeddings_lie_where_they_are_told() -> None:
    """An embedding, a bag and a feature, also of a copied model: the same bits in sync mode."""
    assert trained("sync", None)[0] == trained("sync", 1)[0]


def test_convert(fleet: EmbeddedRuntime) -> None:
    """`convert(servers=...)` names embeddings by their place, tied ones by any; the rest is on all."""
    plain = torch.nn.ModuleDict(
        {name: torch.nn.Embedding(9, 4, sparse=True) for name in ("a", "b", "c")}
    )
    plain["c"].weight = plain["b"].weight
    pst.convert(plain, torch.optim.SparseAdam(plain.parameters()), servers={"c": 2})
    assert sorted((spec.name, spec.servers) for spec in fleet.specs().values()) == [
        ("a", None),
        ("b", 2),
    ]


@pytest.mark.parametrize(
    ("servers", "sentence"),
    [
        ({"b": 1}, "servers has 'b'; the embeddings that become tables are 'a'"),
        ({"a": 0}, r"servers is 0, it must be a whole number in \[1, 1024\]"),
    ],
)
def test_wrong_places(servers: dict[str, int], sentence: str) -> None:
    """A name that is no embedding, and no number of servers; the model stays as it was."""
    plain = torch.nn.ModuleDict({"a": torch.nn.Embedding(9, 4, sparse=True)})
    with pytest.raises(ConfigError, match=sentence):
        pst.convert(plain, torch.optim.SparseAdam(plain.parameters()), servers=servers)
    assert isinstance(plain["a"], torch.nn.Embedding)
