"""The models of examples/models train on psfleet and in plain torch, in short."""

import importlib
from collections.abc import Iterator

import pytest
from flights_data import Flights

import psfleet

pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Nothing of a fleet is left before and after."""
    psfleet.reset()
    yield
    psfleet.reset()


def scores(model: str, *options: str) -> dict[str, float]:
    """What a model prints, embedded."""
    module: dict[str, float] = importlib.import_module(model).main(options)
    psfleet.reset()
    return module


@pytest.mark.parametrize("model", ["dlrm", "deepfm", "dcnv2"])
def test_click_models_learn_alike(model: str, flights: Flights) -> None:
    """On 5,000 flights both have an AUC above chance, and no far apart ones."""
    options = ("--epochs", "1", "--samples", "5000")
    ours, plain = scores(model, *options), scores(model, *options, "--plain")
    assert ours["late/auc"] > 0.52
    assert abs(ours["late/auc"] - plain["late/auc"]) < 0.1


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("two_tower", ["hr@10", "ndcg@10", "mrr@10", "coverage@10"]),
        ("sasrec", ["hr@10", "ndcg@10", "mrr@10", "coverage@10"]),
        ("mmoe", ["click/auc", "buy/auc"]),
    ],
)
def test_models_of_made_up_users_score(model: str, names: list[str]) -> None:
    """On psfleet and in plain torch the same metrics come out, each a share, after two steps."""
    for plain in ([], ["--plain"]):
        actual = scores(model, "--epochs", "1", "--samples", "512", *plain)
        assert list(actual) == names
        assert all(0 <= value <= 1 for value in actual.values())
