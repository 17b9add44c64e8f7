"""torch.autocast around a converted model: every mode and prefetch."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import psfleet.torch as pst
from psfleet.mode_runtimes.switch import connect
from psfleet.strategy import ConsistencySettings
from psfleet.testing.local_fleet import LocalFleet
from tests.leaks import nothing_left
from tests.torch.models import OPTIMIZERS, Batch, DeepFM, batches, curve


def under_autocast(model: Any) -> Callable[[Batch], Any]:
    """The model, whose forward pass is in bfloat16."""

    def forward(batch: Batch) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch)

    return forward


@pytest.mark.parametrize("mode", ["sync", "async", "ssp", "geo", "half-async"])
def test_modes(mode: Any) -> None:
    """With prefetch one worker has the losses of plain torch under autocast, and not those of
    float32."""
    torch.manual_seed(4)
    start = DeepFM()
    plain, exact = copy.deepcopy(start), copy.deepcopy(start)
    expected = curve(under_autocast(plain), OPTIMIZERS["sgd"](plain), batches(30))
    float32 = curve(exact, OPTIMIZERS["sgd"](exact), batches(30))
    with nothing_left(), LocalFleet(1, 1, in_process=True) as fleet:
        runtime = connect(fleet.environment(0), ConsistencySettings(mode=mode))
        model, opt = pst.convert(start, OPTIMIZERS["sgd"](start), runtime=runtime)
        actual = []
        for batch in pst.prefetch(batches(30)):
            actual += curve(under_autocast(model), [opt], [batch])
            if mode == "half-async":  # where the machine decides how far the server is behind
                runtime.flush()
        assert model.get_parameter("mlp.0.weight").dtype == torch.float32
        runtime.close()
    assert actual[0] == expected[0] != float32[0]
    np.testing.assert_allclose(actual, expected, rtol=0.05 if mode == "half-async" else 0.01)
