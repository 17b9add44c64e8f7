"""Parts of a fleet's strategy under psfleet.torch: each works or is refused with a sentence."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import psfleet.torch as pst
from psfleet import fleet as fleet_api
from psfleet.core.base.errors import UsageError
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from tests.runtimes import CountingRuntime
from tests.torch.models import MODELS, OPTIMIZERS, DeepFM, batches, curve, under


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("model", ["deepfm", "bags"])
def test_gradient_merge(model: str, average: bool) -> None:
    """Two steps are one push, which does what torch does with the mean, or sum, of two gradients."""
    torch.manual_seed(3)
    plain = MODELS[model]()
    twin = copy.deepcopy(plain)
    under(gradient_merge={"k_steps": 2, "avg": average})
    runtime = CountingRuntime()
    moved, opt = pst.convert(twin, OPTIMIZERS["adagrad"](twin), runtime=runtime)
    data = list(batches(20))
    actual = curve(moved, [opt], pst.prefetch(data))
    own = OPTIMIZERS["adagrad"](plain)
    expected = []
    for first, second in zip(data[::2], data[1::2], strict=True):
        for optimizer in own:
            optimizer.zero_grad()
        for batch in (first, second):
            loss = plain(batch)
            expected.append(loss.item())
            (loss / 2 if average else loss).backward()
        for optimizer in own:
            optimizer.step()
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert len(runtime.pushed) == 10
    runtime.close()


def test_merged_gradients_are_kept_apart() -> None:
    """Gradients that wait are not changed by zero_grad(set_to_none=False)."""
    under(gradient_merge={"k_steps": 2, "avg": False})
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, opt = pst.convert(model, torch.optim.SGD(model.parameters(), 1.0))
    for factor in (1.0, 2.0):
        opt.zero_grad(set_to_none=False)
        (factor * model(torch.ones(1, 1))).sum().backward()
        opt.step()
    assert model.weight.item() == -3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_amp(dtype: str) -> None:
    """Every gradient travels in 16 bits, dense ones and rows, and training stays close to float32."""
    torch.manual_seed(3)
    start = DeepFM()
    plain = copy.deepcopy(start)
    expected = curve(plain, OPTIMIZERS["adam"](plain), batches(30))
    under(amp={"dtype": dtype})
    runtime = CountingRuntime()
    moved, opt = pst.convert(start, OPTIMIZERS["adam"](start), runtime=runtime)
    actual = curve(moved, [opt], batches(30))
    assert actual != expected
    np.testing.assert_allclose(actual, expected, rtol=0.02)
    assert {g.precision for push in runtime.pushed for g in push} == {dtype}
    assert {len(push) for push in runtime.pushed} == {6}
    runtime.close()


def test_amp_skips_what_does_not_fit() -> None:
    """A float16 step with an overflow changes nothing and lowers the scale, which is in state_dict()."""
    under(amp={"dtype": "float16", "decr_every_n_nan_or_inf": 1})
    model = nn.Linear(1, 1, bias=False)
    model, opt = pst.convert(model, torch.optim.SGD(model.parameters(), 1.0))
    before = model.weight.item()
    (1e9 * model(torch.ones(1, 1))).sum().backward()
    opt.step()
    assert model.weight.item() == before
    scale = opt.state_dict()["loss_scaling"]
    assert scale["scale"] == pytest.approx(0.8 * 32768)
    other, second = pst.convert(
        twin := nn.Linear(1, 1), torch.optim.SGD(twin.parameters(), 1.0), name="other"
    )
    second.load_state_dict(opt.state_dict() | {"param_groups": second.state_dict()["param_groups"]})
    assert second.state_dict()["loss_scaling"] == scale
    assert isinstance(other, nn.Linear)


class Blocks(nn.Module):
    """Blocks in a ModuleList, with dropout, over an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(60, 8, mode="sum", sparse=True)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1))

    def forward(self, batch: Any) -> Any:
        x = self.rows(batch["ids"])
        for block in self.blocks:
            x = x + block(x)
        loss = nn.functional.binary_cross_entropy_with_logits
        return loss(self.head(x)[:, 0], batch["label"])


@pytest.mark.parametrize(
    "settings", [{}, {"checkpoints": ["blocks.0", "rows"]}], ids=["found", "named"]
)
def test_recompute(settings: dict[str, Any]) -> None:
    """Blocks are computed twice, losses are the same bits, and a copy of the model still works."""
    torch.manual_seed(3)
    start = Blocks()
    gradients = []
    for parts in ({}, {"recompute": settings}):
        under(**parts)
        model = copy.deepcopy(start)
        model, opt = pst.convert(model, OPTIMIZERS["adagrad"](model))
        calls: list[int] = []
        inner = model.get_submodule("blocks.0.0")
        inner.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(4)
        gradients.append((curve(model, [opt], batches(5)), len(calls)))
        with torch.no_grad():
            batch = next(batches(1, 9))
            assert model.eval()(batch) == copy.deepcopy(model)(batch)
    assert gradients[0] == (gradients[1][0], 5)
    assert gradients[1][1] == 10


def test_barrier_brings_what_others_have_changed(fleet: EmbeddedRuntime) -> None:
    """After fleet.barrier_worker() the model's next forward pass has the servers' values."""
    model = nn.Linear(2, 1, bias=False)
    model, opt = pst.convert(model, torch.optim.SGD(model.parameters(), 1.0))
    [spec] = fleet.specs().values()
    fleet.push([Gradient(spec.key, np.ones((1, 2), np.float32), None, 1.0)])
    before = model(torch.ones(1, 2)).item()
    fleet_api.barrier_worker()
    assert model(torch.ones(1, 2)).item() == pytest.approx(before - 2)
    assert opt.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize(
    "value",
    [lambda loss: loss.item(), lambda loss: loss.detach(), lambda loss: np.float32(loss.item())],
)
@pytest.mark.parametrize("policy", ["say", "stop", "skip", "ignore"])
def test_the_nan_policy_decides_about_a_loss(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    policy: str,
    value: Callable[[torch.Tensor], Any],
) -> None:
    """The documented loop hands over a loss of NaN as it is, and PSFLEET_ON_NAN says what becomes of it."""
    monkeypatch.setenv("PSFLEET_ON_NAN", policy)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, opt = pst.convert(
        model, torch.optim.SGD(model.parameters(), 1.0), runtime=CountingRuntime()
    )
    loss = model(torch.ones(1, 1)).sum() * torch.nan
    loss.backward()
    if policy == "stop":
        with pytest.raises(
            UsageError, match=r"^worker 0, step 1: the loss is nan; it was not pushed"
        ):
            opt.step(samples=1, loss=value(loss))
    else:
        opt.step(samples=1, loss=value(loss))
    assert bool(model.weight.isnan()) == (policy in ("say", "ignore"))
    assert capfd.readouterr().err.count("the loss is nan") == (policy in ("say", "skip"))


def test_what_is_no_loss_is_refused() -> None:
    """A loss is a number."""
    model = nn.Linear(1, 1)
    _, opt = pst.convert(model, torch.optim.SGD(model.parameters(), 1.0))
    for wrong in ("0.5", [0.5], torch.ones(2), True):
        with pytest.raises(UsageError, match=r"step: loss is .*, it must be a number or None"):
            opt.step(loss=wrong)  # type: ignore[arg-type]
