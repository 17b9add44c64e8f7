"""The models of examples/models learn as in plain torch, in one process and on a cluster."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from flights_data import Flights

import psfleet
from tests.launch.conftest import Launch, launch
from tests.programs import IN_DOCS

pytestmark = pytest.mark.long

pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")

__all__ = ["launch"]

MODELS = Path(__file__).parents[2] / "examples" / "models"
FEW = ("--epochs", "1", "--samples", "1024")


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


@pytest.mark.parametrize(
    "model", ["dlrm", *(pytest.param(name, marks=IN_DOCS) for name in ("deepfm", "dcnv2"))]
)
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
        pytest.param("sasrec", ["hr@10", "ndcg@10", "mrr@10", "coverage@10"], marks=IN_DOCS),
        ("mmoe", ["click/auc", "buy/auc"]),
    ],
)
def test_models_of_made_up_users_score(model: str, names: list[str]) -> None:
    """On psfleet and in plain torch the same metrics come out, each a share, after two steps."""
    for plain in ([], ["--plain"]):
        actual = scores(model, "--epochs", "1", "--samples", "512", *plain)
        assert list(actual) == names
        assert all(0 <= value <= 1 for value in actual.values())


def on_cluster(launch: Launch, model: str) -> dict[str, float]:
    """What a model prints as a job."""
    script = str(MODELS / f"{model}.py")
    options = ("--servers", "2", "--workers", "2", "--sync", "--no-progress")
    code, out, err = launch(*options, script, *FEW).ends()
    assert code == 0, err
    return {name: float(value) for name, value in re.findall(r"(\S+) (\d\.\d{4})", out)}


@IN_DOCS
@pytest.mark.timeout(600)  # torch is imported by two workers, and kernels are compiled
@pytest.mark.parametrize("model", ["mmoe", "deepfm", "dlrm", "dcnv2"])
def test_a_cluster_learns_as_one_process(launch: Launch, model: str, flights: Flights) -> None:
    """In sync mode both workers have a half of each batch, so the AUC is that of one process but for
    rounding."""
    actual, embedded = on_cluster(launch, model), scores(model, *FEW)
    assert actual == pytest.approx(embedded, abs=0.002)


@IN_DOCS
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["two_tower", "sasrec"])
def test_a_cluster_scores_sessions(launch: Launch, model: str) -> None:
    """With other negatives in each worker the metrics are not those of one process, but shares like them."""
    actual = on_cluster(launch, model)
    assert list(actual) == ["hr@10", "ndcg@10", "mrr@10", "coverage@10"]
    assert all(0 <= value <= 1 for value in actual.values())
