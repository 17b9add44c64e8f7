"""convert(): the loss curve of single-process torch, and what is refused."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")

import psfleet.torch as pst  # noqa: E402  # after the check for torch
from tests.torch.models import MODELS, OPTIMIZERS, batches, curve  # noqa: E402


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_curve_of_torch(model: str, optimizer: str) -> None:
    """200 losses of a converted model are those of the same model in plain torch."""
    torch.manual_seed(3)
    plain = MODELS[model]()
    twin = copy.deepcopy(plain)
    wanted = curve(plain, OPTIMIZERS[optimizer](plain), batches(200))
    moved, opt = pst.convert(twin, OPTIMIZERS[optimizer](twin))
    got = curve(moved, [opt], batches(200))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert np.mean(wanted[-20:]) < 0.95 * np.mean(wanted[:20])
