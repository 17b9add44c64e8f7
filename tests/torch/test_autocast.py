"""torch.autocast around a converted model: every mode and prefetch."""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from psfleet.mode_runtimes.switch import connect
from psfleet.strategy import ConsistencySettings
from psfleet.testing.local_fleet import LocalFleet
from tests.leaks import nothing_left

pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")

import torch  # after the check for torch

import psfleet.torch as pst
from tests.torch.models import OPTIMIZERS, Batch, DeepFM, batches, curve


def trained(
    model: Any, optimizers: Any, data: Iterable[Batch], then: Callable[[], None] = lambda: None
) -> list[float]:
    """The losses of training whose forward pass is under autocast."""
    losses = []
    for batch in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        then()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", ["sync", "async", "ssp", "geo", "half-async"])
def test_modes(mode: Any) -> None:
    """With prefetch one worker has the losses of plain torch under autocast, and not those of
    float32."""
    torch.manual_seed(4)
    start = DeepFM()
    plain, exact = copy.deepcopy(start), copy.deepcopy(start)
    expected = trained(plain, OPTIMIZERS["sgd"](plain), batches(30))
    float32 = curve(exact, OPTIMIZERS["sgd"](exact), batches(30))
    with nothing_left(), LocalFleet(1, 1, in_process=True) as fleet:
        runtime = connect(fleet.environment(0), ConsistencySettings(mode=mode))
        model, opt = pst.convert(start, OPTIMIZERS["sgd"](start), runtime=runtime)
        # In half-async mode the machine decides how far the server is behind, so each step waits.
        then = runtime.flush if mode == "half-async" else lambda: None
        actual = trained(model, [opt], pst.prefetch(batches(30)), then)
        assert model.get_parameter("mlp.0.weight").dtype == torch.float32
        runtime.close()
    assert actual[0] == expected[0] != float32[0]
    np.testing.assert_allclose(actual, expected, rtol=0.05 if mode == "half-async" else 0.01)
