"""Embeddings of torch whose rows are stored in 16 bits."""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

import copy

import numpy as np
import pytest

from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.features import Feature, FeatureSet, Table
from psfleet.optimizer import SGD

pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")

import torch  # after the check for torch

import psfleet.torch as pst
from tests.torch import models  # noqa: F401  # sets torch's threads


def test_embeddings(fleet: EmbeddedRuntime) -> None:
    """`precision=` is the table's, of an embedding, a bag and a feature; a copy of the model keeps it."""
    features = FeatureSet([Feature("f", Table("features", 16, precision="bfloat16"))])
    model = torch.nn.ModuleDict(
        {
            "one": pst.Embedding(None, 16, name="one", precision="bfloat16"),
            "bag": pst.EmbeddingBag(20, 16, name="bag", precision="bfloat16"),
            "features": pst.FeatureEmbedding(features),
        }
    )
    model = copy.deepcopy(model)
    opt = pst.DistributedOptimizer(model, torch.optim.SGD(model.parameters(), 0.1))
    ids = torch.arange(6)
    for _ in range(3):
        out = model["one"](ids).square().mean() + model["bag"](ids.reshape(2, 3)).square().mean()
        (out + model["features"]({"f": ids})["f"].square().mean()).backward()
        opt.step()
        opt.zero_grad()
    specs = fleet.specs().values()
    assert {spec.name: spec.precision for spec in specs} == dict.fromkeys(
        ("one", "bag", "features"), "bfloat16"
    )
    bits = model["one"](ids).detach().numpy().view(np.uint32)
    assert bits.any()
    assert not (bits & np.uint32(0xFFFF)).any()


def test_own_optimizer(fleet: EmbeddedRuntime) -> None:
    """An embedding with an optimizer of its own keeps its precision."""
    embedding = pst.Embedding(None, 16, name="e", optimizer=SGD(0.5), precision="bfloat16")
    pst.DistributedOptimizer(embedding)
    [spec] = fleet.specs().values()
    assert spec.precision == "bfloat16"
