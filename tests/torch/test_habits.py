"""What ordinary scripts of torch do around a model: each gives what plain torch gives, or a sentence."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import psfleet.torch as pst
from psfleet.core.base.errors import UsageError
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.leaks import nothing_left
from tests.torch.models import MODELS, OPTIMIZERS, batches, curve, dense_batches, dense_curve, net
from tests.trainings import in_threads

Script = Callable[[Any, Any], list[float]]


def all_zero(optimizers: Any, **how: bool) -> None:
    """Clear the gradients of all."""
    for optimizer in optimizers:
        optimizer.zero_grad(**how)


def all_step(optimizers: Any) -> None:
    """Step with all."""
    for optimizer in optimizers:
        optimizer.step()


def dense_parameters(model: Any) -> list[Any]:
    """Parameters whose gradients are dense, before and after the conversion."""
    return [p for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]


def zeroed_in_place(model: Any, optimizers: Any) -> list[float]:
    """zero_grad(set_to_none=False)."""
    return curve(model, optimizers, batches(20), set_to_none=False)


def clipped(model: Any, optimizers: Any) -> list[float]:
    """Clipping of dense gradients by norm and by value."""

    def clip() -> None:
        nn.utils.clip_grad_norm_(dense_parameters(model), 0.05)
        nn.utils.clip_grad_value_(dense_parameters(model), 0.01)

    return curve(model, optimizers, batches(20), clip)


def accumulated(model: Any, optimizers: Any) -> list[float]:
    """One step for the gradients of four batches."""
    losses = []
    for number, batch in enumerate(batches(24)):
        loss = model(batch) / 4
        loss.backward()
        losses.append(loss.item())
        if number % 4 == 3:
            all_step(optimizers)
            all_zero(optimizers)
    return losses


def scaled(model: Any, optimizers: Any) -> list[float]:
    """Losses scaled by a GradScaler, under autocast."""
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    for batch in batches(20):
        all_zero(optimizers)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch)
        scaler.scale(loss.float()).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def averaged(model: Any, optimizers: Any) -> list[float]:
    """Losses of two averages of the model, of plain means and of moving ones."""
    averages = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
    for batch in batches(10):
        curve(model, optimizers, [batch])
        for average in averages:
            average.update_parameters(model)
    return [average(batch).item() for average in averages for batch in batches(3, 9)]


def copied(model: Any, optimizers: Any) -> list[float]:
    """Losses of copies: of one made before the model was trained on, and of one that is loaded."""
    accumulated(model, optimizers)
    kept, loaded = copy.deepcopy(model), copy.deepcopy(model)
    accumulated(model, optimizers)
    loaded.load_state_dict(model.state_dict())
    accumulated(model, optimizers)
    return [each(batch).item() for each in (kept, loaded) for batch in batches(3, 9)]


@pytest.mark.parametrize(
    ("script", "name"),
    [
        *((zeroed_in_place, "sequence"), (accumulated, "bags"), (clipped, "deepfm")),
        *((scaled, "bags"), (averaged, "deepfm"), (averaged, "bags")),
        *((copied, "sequence"), (copied, "bags")),
    ],
)
def test_as_in_torch(name: str, script: Script) -> None:
    """Losses are plain torch's to 1e-5."""
    torch.manual_seed(3)
    plain = MODELS[name]()
    twin = copy.deepcopy(plain)
    expected = script(plain, OPTIMIZERS["adam"](plain))
    moved, opt = pst.convert(twin, OPTIMIZERS["adam"](twin))
    np.testing.assert_allclose(script(moved, [opt]), expected, rtol=1e-5)


def thawing(model: Any, optimizer: Any) -> list[float]:
    """The first layer is frozen for 6 steps, and the last one from step 9 on."""
    losses: list[float] = []
    for number, batch in enumerate(dense_batches(12, 2)):
        if number == 6:
            model[0].requires_grad_(True)
        if number == 9:
            model[2].requires_grad_(False)
        losses += dense_curve(model, [optimizer], [batch])
    return losses


def test_layers_that_thaw() -> None:
    """A layer that was frozen when the model was converted is trained from when it is unfrozen."""
    plain = net()
    plain[0].requires_grad_(False)
    twin = copy.deepcopy(plain)
    expected = thawing(plain, torch.optim.Adam(plain.parameters(), 0.01))
    moved, opt = pst.convert(twin, torch.optim.Adam(twin.parameters(), 0.01))
    np.testing.assert_allclose(thawing(moved, opt), expected, rtol=1e-5)
    again = net()
    again[0].requires_grad_(False)
    again, resumed = pst.convert(
        again, torch.optim.Adam(again.parameters(), 0.01), runtime=EmbeddedRuntime()
    )
    again.load_state_dict(moved.state_dict())
    resumed.load_state_dict(opt.state_dict())
    for model in (moved, again):
        model[0].requires_grad_(False)
        model[2].requires_grad_(True)
    assert thawing(again, resumed) == thawing(moved, opt)
    table = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    table[0].requires_grad_(False)
    table, opt = pst.convert(table, torch.optim.SGD(table.parameters(), 0.1))
    table[0].requires_grad_(True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"'0\.weight' was frozen when the model was converted"):
        opt.step()


def test_a_part_that_is_loaded() -> None:
    """load_state_dict of a part of the model, such as a trained encoder, makes its values the fleet's."""
    plain, donor = net(), nn.Linear(4, 8)
    twin = copy.deepcopy(plain)
    own = torch.optim.Adam(plain.parameters(), 0.01)
    twin, opt = pst.convert(twin, torch.optim.Adam(twin.parameters(), 0.01))
    states = []
    for model, optimizer in ((plain, own), (twin, opt)):
        losses = thawing(model, optimizer)
        model.requires_grad_(True)
        model[0].load_state_dict(donor.state_dict())
        states.append(losses + thawing(model, optimizer))
    np.testing.assert_allclose(states[1], states[0], rtol=1e-5)
    kept = copy.deepcopy(twin)
    before = twin.state_dict()["0.weight"].clone()
    kept[0].load_state_dict(donor.state_dict())
    assert torch.equal(twin.state_dict()["0.weight"], before)


def test_two_workers_thaw_alike() -> None:
    """A layer that thaws in two workers has the values of worker 0 in both."""
    states: list[Any] = [{}, {}]
    with nothing_left(), LocalFleet(1, 2, in_process=True) as fleet:

        def work(worker: int) -> None:
            runtime = fleet.connect(worker, "sync")
            model = net()
            model[0].requires_grad_(False)
            if worker == 1:
                nn.init.zeros_(model[0].weight)
            model, opt = pst.convert(
                model, torch.optim.Adam(model.parameters(), 0.01), runtime=runtime
            )
            thawing(model, opt)
            runtime.flush()
            states[worker] = model.state_dict()
            runtime.close()

        in_threads([lambda: work(0), lambda: work(1)])
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    assert states[0]["0.weight"].abs().min() > 0


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_other_precisions(cast: str) -> None:
    """Only float32 goes to the servers, before the conversion and after it."""
    model = net()
    model, opt = pst.convert(model, torch.optim.SGD(model.parameters(), 0.1))
    getattr(model, cast)()
    sentence = r"'0\.weight' has become torch\.\w+, .*torch\.autocast"
    with pytest.raises(UsageError, match=sentence):
        model(torch.ones(1, 4))
    model[0](torch.ones(1, 4).to(model[0].weight.dtype)).sum().backward()
    with pytest.raises(UsageError, match=sentence):
        opt.step()
    for part in (nn.Embedding(4, 2, sparse=True), nn.EmbeddingBag(4, 2, sparse=True), net()):
        other = getattr(nn.Sequential(part), cast)()
        with pytest.raises(UsageError, match=r"convert model\.float\(\), .*torch\.autocast"):
            pst.convert(other, torch.optim.SGD(other.parameters(), 0.1))


def test_what_would_be_lost_is_refused() -> None:
    """Replaced parameters, hooks of the optimizers that are converted, and pickles."""
    model = net()
    hooked = torch.optim.SGD(model.parameters(), 0.1)
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match=r"has step hooks.*convert\(\) returns"):
        pst.convert(model, hooked)
    model, opt = pst.convert(model, torch.optim.SGD(model.parameters(), 0.1))
    seen: list[int] = []
    opt.register_step_pre_hook(lambda *_: seen.append(1))
    opt.step()
    assert seen == [1]
    for whole in (model, opt):
        with pytest.raises(UsageError, match=r"save model\.state_dict\(\) and opt\.state_dict\(\)"):
            torch.save(whole, io.BytesIO())
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(opt)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=r"'0\.weight' .* load without assign=True"):
        model.load_state_dict(values, assign=True)


def test_keys_that_do_not_fit() -> None:
    """load_state_dict(strict=True) names keys that an embedding lacks or does not know."""
    model = MODELS["deepfm"]()
    model, _ = pst.convert(model, OPTIMIZERS["adam"](model))
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "deep\.bias"'):
        model.load_state_dict({**state, "deep.bias": torch.zeros(1)})
    del state["deep.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "deep\.weight"'):
        model.load_state_dict(state)
    actual = model.load_state_dict({**state, "other": torch.zeros(1)}, strict=False)
    assert actual.missing_keys == ["deep.weight"]
    assert actual.unexpected_keys == ["other"]
