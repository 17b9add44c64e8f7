"""Every scheduler of torch.optim.lr_scheduler on a converted optimizer, against plain torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR

import psfleet.torch as pst
from psfleet.core.base.errors import UsageError
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from tests.torch.models import DeepFM, dense_batches, dense_curve, dense_of, net, tables_of

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda epoch: 0.95),
    "StepLR": lambda o: lr.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [3, 7], 0.5),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.3, 5),
    "LinearLR": lambda o: lr.LinearLR(o, 0.3, 1.0, 5),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 15, 2.0),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 4),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, 1.0, 4), lr.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler(
        [lr.ConstantLR(o, 0.1, 4), lr.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=1, factor=0.5, threshold=0.5),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.001, 0.05, step_size_up=4, cycle_momentum=False),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.05, total_steps=20, cycle_momentum=False),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=5),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "tensor rate": lambda p: torch.optim.Adam(p, torch.tensor(0.01), foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "groups": lambda p: torch.optim.Adam(
        [{"params": [each], "lr": 0.01 * number} for number, each in enumerate(p, 1)]
    ),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}


def follow(model: nn.Module, optimizer: Any, scheduler: Any) -> list[float]:
    """Losses of 20 steps, with a step of the scheduler after each."""
    losses: list[float] = []
    for batch in dense_batches(20, 2):
        losses += dense_curve(model, [optimizer], [batch])
        scheduler.step(*([losses[-1]] if isinstance(scheduler, lr.ReduceLROnPlateau) else []))
    return losses


def test_all_classes_are_here() -> None:
    """The table above has every scheduler that torch has."""
    classes = {
        name
        for name, kind in vars(lr).items()
        if isinstance(kind, type) and issubclass(kind, lr.LRScheduler) and name[0] != "_"
    }
    assert classes - {"LRScheduler"} <= SCHEDULERS.keys()


PAIRS = [(name, *(("adam", False), ("momentum", True))[n % 2]) for n, name in enumerate(SCHEDULERS)]
PAIRS += [("StepLR", "tensor rate", True), ("OneCycleLR", "fused", False)]
PAIRS += [("StepLR", "groups", True), ("CosineAnnealingLR", "groups", False)]


@pytest.mark.parametrize(("scheduler", "optimizer", "before"), PAIRS)
def test_rates_are_torchs(scheduler: str, optimizer: str, before: bool) -> None:
    """Losses are plain torch's, whether the scheduler was made before or after the conversion; each group has
    its rate."""
    make, schedule = OPTIMIZERS[optimizer], SCHEDULERS[scheduler]
    plain = net()
    own = make(plain.parameters())
    expected = follow(plain, own, schedule(own))
    model = net()
    old = make(model.parameters())
    made = schedule(old) if before else None
    model, opt = pst.convert(model, old)
    np.testing.assert_allclose(follow(model, opt, made or schedule(opt)), expected, rtol=1e-5)


def converted(optimizer: Callable[[Any], torch.optim.Optimizer]) -> Any:
    """The optimizer of a converted net."""
    model = net()
    return pst.convert(model, optimizer(model.parameters()), runtime=EmbeddedRuntime())[1]


def test_cycles_of_momentum_are_refused() -> None:
    """What OneCycleLR and CyclicLR do with betas and momentum is refused, with what to set instead."""
    opt = converted(OPTIMIZERS["adam"])
    assert opt.defaults["betas"] == (0.9, 0.999)
    lr.OneCycleLR(opt, 0.1, total_steps=10)
    with pytest.raises(UsageError, match=r"betas changed from \(0\.9, .* cycle_momentum=False"):
        opt.step()
    opt = converted(OPTIMIZERS["momentum"])
    scheduler = lr.CyclicLR(opt, 0.1, 0.2)
    opt.step()
    scheduler.step()
    with pytest.raises(
        UsageError, match=r"momentum changed from 0\.9 to 0\.8.*cycle_momentum=False"
    ):
        opt.step()
    model = DeepFM()
    kinds = [
        torch.optim.SGD(tables_of(model), 0.1, momentum=0.9),
        torch.optim.Adam(dense_of(model)),
    ]
    _, opt = pst.convert(model, kinds)
    with pytest.raises(ValueError, match="cycle_momentum"):
        lr.OneCycleLR(opt, [0.1, 0.1], total_steps=9)
