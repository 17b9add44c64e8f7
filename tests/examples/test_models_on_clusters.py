"""The models of examples/models on two servers and two workers: in sync mode they learn as in one process."""

import re
from pathlib import Path

import pytest

from tests.launch.conftest import Launch, launch
from tests.programs import IN_DOCS

pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")
from tests.examples.test_models import alone, scores

__all__ = ["alone", "launch"]

MODELS = Path(__file__).parents[2] / "examples" / "models"
pytestmark = pytest.mark.timeout(600)  # torch is imported by two workers, and kernels are compiled
FEW = ("--epochs", "1", "--samples", "1024")


def on_cluster(launch: Launch, model: str) -> dict[str, float]:
    """What a model prints as a job."""
    script = str(MODELS / f"{model}.py")
    options = ("--servers", "2", "--workers", "2", "--sync", "--no-progress")
    code, out, err = launch(*options, script, *FEW).ends()
    assert code == 0, err
    return {name: float(value) for name, value in re.findall(r"(\S+) (\d\.\d{4})", out)}


@pytest.mark.parametrize(
    "model", ["mmoe", *(pytest.param(name, marks=IN_DOCS) for name in ("deepfm", "dlrm", "dcnv2"))]
)
def test_a_cluster_learns_as_one_process(
    launch: Launch, model: str, request: pytest.FixtureRequest
) -> None:
    """Both workers have a half of each batch, so the AUC is that of one process but for rounding.

    The others differ in what they do with rows, not in how they get them: make docs trains each.
    """
    if model != "mmoe":
        request.getfixturevalue("flights")
    actual, embedded = on_cluster(launch, model), scores(model, *FEW)
    assert actual == pytest.approx(embedded, abs=0.002)


@IN_DOCS
@pytest.mark.parametrize("model", ["two_tower", "sasrec"])
def test_a_cluster_scores_sessions(launch: Launch, model: str) -> None:
    """With other negatives in each worker the metrics are not those of one process, but shares like them."""
    actual = on_cluster(launch, model)
    assert list(actual) == ["hr@10", "ndcg@10", "mrr@10", "coverage@10"]
    assert all(0 <= value <= 1 for value in actual.values())
