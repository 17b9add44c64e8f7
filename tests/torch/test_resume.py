"""Resume with {model.state_dict(), opt.state_dict()} and in a second incarnation: exactly, or refused."""

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import psfleet.torch as pst
from psfleet import fluid
from psfleet import optimizer as fleet_optimizer
from psfleet.core.base.errors import Fenced, PsfleetError, ShapeError, UsageError
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.schema.entry import ProbabilityEntry
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import current
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.leaks import nothing_left
from tests.torch.models import (
    MODELS,
    OPTIMIZERS,
    batches,
    curve,
    dense_batches,
    dense_curve,
    dense_of,
    net,
    tables_of,
    under,
)

optim = torch.optim
DENSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, 0.1),
    "decay": lambda p: optim.SGD(p, 0.1, weight_decay=0.1),
    "momentum": lambda p: optim.SGD(p, 0.05, momentum=0.9),
    "nesterov": lambda p: optim.SGD(p, 0.05, momentum=0.5, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: optim.Adagrad(
        p, 0.1, eps=1e-3, initial_accumulator_value=0.1, weight_decay=0.1
    ),
    "adam": lambda p: optim.Adam(p, 0.01, betas=(0.5, 0.9), eps=0.01, weight_decay=0.01),
    "amsgrad": lambda p: optim.Adam(p, 0.05, amsgrad=True, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, 0.01, weight_decay=0.5),
    "nadam": lambda p: optim.NAdam(p, 0.01, weight_decay=0.1),
    "radam": lambda p: optim.RAdam(p, 0.01),
    "rmsprop": lambda p: optim.RMSprop(p, 0.01),
    "rmsprop momentum": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, weight_decay=0.1),
    "rmsprop centered": lambda p: optim.RMSprop(p, 0.01, centered=True, momentum=0.5, eps=1e-3),
    "adadelta": lambda p: optim.Adadelta(p, 1.0, rho=0.8),
}


def stored(*parts: Any) -> list[Any]:
    """What torch.load(weights_only=True) gives of what torch.save wrote."""
    file = io.BytesIO()
    torch.save(list(parts), file)
    file.seek(0)
    loaded: list[Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("name", DENSE)
def test_every_dense_optimizer(name: str) -> None:
    """Training resumed from the two state dicts has the losses of training that was not interrupted. They are
    in torch's layout: plain torch goes on from them, and a fleet from plain torch's, loaded before or after
    the conversion."""
    first, later = dense_batches(12, 1), dense_batches(12, 2)
    plain = net()
    own = DENSE[name](plain.parameters())
    dense_curve(plain, [own], first)
    begin = stored(plain.state_dict(), own.state_dict())
    torchs = dense_curve(plain, [own], later)
    for loaded_before in (True, False):
        model = net()
        mine = DENSE[name](model.parameters())
        if loaded_before:
            mine.load_state_dict(begin[1])
        model, opt = pst.convert(model, mine)
        model.load_state_dict(begin[0])
        if not loaded_before:
            opt.load_state_dict(begin[1])
        states = stored(model.state_dict(), opt.state_dict())
        expected = dense_curve(model, [opt], later)
        np.testing.assert_allclose(expected, torchs, rtol=1e-4)
        plain = net()
        own = DENSE[name](plain.parameters())
        for part, state in zip((plain, own), stored(*states), strict=True):
            part.load_state_dict(state)
        np.testing.assert_allclose(dense_curve(plain, [own], later), torchs, rtol=1e-4)
    for order in (1, -1):
        again = net()
        again, opt = pst.convert(again, DENSE[name](again.parameters()), runtime=EmbeddedRuntime())
        for part, state in list(zip((again, opt), states, strict=True))[::order]:
            part.load_state_dict(state)
        assert dense_curve(again, [opt], later) == expected
    if name not in ("sgd", "decay"):
        model = net()
        model, opt = pst.convert(model, DENSE[name](model.parameters()), runtime=EmbeddedRuntime())
        model.load_state_dict(states[0])
        assert dense_curve(model, [opt], later) != expected  # state is what makes the difference


@pytest.mark.long
def test_embeddings() -> None:
    """So are models with embeddings, on servers of their own, under a schedule."""
    cases = [("deepfm", "adam"), ("bags", "adagrad"), ("sequence", "momentum"), ("bags", "sgd")]
    data = list(batches(20))
    with nothing_left(), LocalFleet(2, 1, in_process=True) as fleet:
        runtime = fleet.connect(0, "sync")
        for model_name, optimizer in cases:
            instances = []
            for prefix in ("first", "second"):
                torch.manual_seed(3)
                model = MODELS[model_name]()
                made, name = OPTIMIZERS[optimizer](model), f"{prefix} {model_name}"
                instances.append(pst.convert(model, made, name=name, runtime=runtime))
            (model, opt), (other, resumed) = instances
            schedule, its = (optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (opt, resumed))
            curve(model, [opt], data[:10])
            schedule.step()
            states = stored(model.state_dict(), opt.state_dict(), schedule.state_dict())
            schedule.step()
            expected = curve(model, [opt], data[10:])
            other.load_state_dict(states[0])
            resumed.load_state_dict(states[1])
            its.load_state_dict(states[2])
            its.step()
            assert curve(other, [resumed], data[10:]) == expected, (model_name, optimizer)
            state, its_state = opt.state_dict(), resumed.state_dict()
            torch.testing.assert_close(its_state, state, rtol=0, atol=0)
        runtime.close()


def any_id() -> nn.Module:
    """Two embeddings for any id, under torch's optimizer and under psfleet's own, and a line."""
    torch.manual_seed(5)
    own = fleet_optimizer.Adam(fluid.layers.piecewise_decay([12], [0.05, 0.01]))
    return nn.ModuleDict(
        {
            "users": pst.Embedding(None, 5, name="users"),
            "goods": pst.Embedding(None, 5, name="goods", optimizer=own),
            "line": nn.Linear(5, 1),
        }
    )


def any_id_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """For `any_id`."""
    return [optim.SparseAdam([model["users"].weight]), optim.Adam(model["line"].parameters())]


def any_id_curve(model: Any, opt: Any, seed: int) -> list[float]:
    """Losses of `any_id`, of ids anywhere in int64."""
    dice = torch.Generator().manual_seed(seed)

    def loss(ids: Any) -> Any:
        rows = model["users"](ids - 2**62) * model["goods"](ids * 7 + 2**50)
        return (model["line"](rows)[:, 0] - (ids % 2)).square().mean()

    data: Any = [torch.randint(0, 50, (16,), generator=dice) for _ in range(10)]
    return curve(loss, [opt], data)


def test_any_id() -> None:
    """Tables without a number of rows, and optimizers and schedules of psfleet, go on too."""
    model = any_id()
    opt = pst.DistributedOptimizer(model, any_id_optimizers(model))
    any_id_curve(model, opt, 1)
    states = stored(model.state_dict(), opt.state_dict())
    expected = any_id_curve(model, opt, 2)
    for order in (1, -1):
        other: Any = any_id()
        again = pst.DistributedOptimizer(other, any_id_optimizers(other), runtime=EmbeddedRuntime())
        for part, state in list(zip((other, again), states, strict=True))[::order]:
            part.load_state_dict(state)
        assert any_id_curve(other, again, 2) == expected
    part = {key: states[0][key][1:] for key in ("users.ids", "users.weight")}
    with pytest.raises(UsageError, match=r"has a row for id .* load it before the first"):
        other.load_state_dict({**states[0], **part})
    fresh = any_id()
    pst.DistributedOptimizer(fresh, any_id_optimizers(fresh), runtime=EmbeddedRuntime())
    with pytest.raises(RuntimeError, match=r'Missing key.*"users\.ids"'):
        fresh.load_state_dict({k: v for k, v in states[0].items() if k != "users.ids"})


def test_rates_follow_after_a_load() -> None:
    """A scheduler made before load_state_dict still sets the rates after it."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, opt = pst.convert(model, optim.SGD(model.parameters(), 1.0))
    schedule = optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.5**epoch)
    opt.load_state_dict(opt.state_dict())
    moved = []
    for _ in range(3):
        opt.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        opt.step()
        schedule.step()
        moved.append(model.weight.item())
    assert moved == [-1, -1.5, -1.75]


def adam(model: nn.Module, **options: Any) -> tuple[nn.Module, pst.DistributedOptimizer]:
    """The model under Adam, on a fleet of its own."""
    return pst.convert(model, optim.Adam(model.parameters(), **options), runtime=EmbeddedRuntime())


def test_foreign_states_are_refused() -> None:
    """State of other optimizers, options, shapes or of an older psfleet is refused; nothing changes."""
    model, opt = adam(net())
    dense_curve(model, [opt], dense_batches(5, 1))
    good = opt.state_dict()
    before = copy.deepcopy(good)

    def refuse(bad: Any, words: str, error: type[PsfleetError] = UsageError) -> None:
        with pytest.raises(error, match=words):
            opt.load_state_dict(bad)
        torch.testing.assert_close(opt.state_dict(), before, rtol=0, atol=0)

    refuse({**good, "state": {}}, "has no optimizer state: .* fleet.load_model")
    plain = net()
    for kind in (
        optim.SGD(plain.parameters(), 0.1, momentum=0.9),
        optim.Adagrad(plain.parameters()),
    ):
        dense_curve(plain, [kind], dense_batches(2, 1))
        refuse(kind.state_dict(), r"saved by another optimizer, and the rule here is Adam\(")
    _, other = adam(net(), betas=(0.5, 0.9), weight_decay=0.1)
    refuse(
        other.state_dict(),
        r"betas changed from \(0\.9, 0\.999\) to \(0\.5, 0\.9\), .*weight_decay changed from 0 to 0\.1",
    )
    wrong = copy.deepcopy(good)
    wrong["state"][0]["exp_avg"] = torch.zeros(3)
    refuse(wrong, r"'0\.weight' has 'exp_avg' of shape \(3,\); it must be \(8, 4\)", ShapeError)
    refuse({**good, "tables": {"users": {}}}, "only the state dict has the table 'users'")


def test_foreign_state_before_the_conversion(fleet: EmbeddedRuntime) -> None:
    """convert() refuses state of another optimizer; no table is made and the optimizer works on."""
    plain, model = net(), net()
    other = optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    dense_curve(plain, [other], dense_batches(2, 1))
    mine = optim.Adam(model.parameters())
    for parameter, state in zip(model.parameters(), other.state.values(), strict=True):
        mine.state[parameter] = dict(state)
    with pytest.raises(UsageError, match=r"'0\.weight' lacks 'exp_avg'; .* another optimizer"):
        pst.convert(model, mine)
    assert fleet.specs() == {}
    assert len(mine.state_dict()["state"]) == 4


def test_what_a_state_dict_cannot_hold_is_refused() -> None:
    """Tables too large for memory, counts of an entry, and gradients that wait to be merged."""
    large = nn.Embedding(10**12, 8, sparse=True, device="meta")
    moved, opt = pst.convert(large, optim.SparseAdam(large.parameters()))
    counted = pst.Embedding(None, 2, name="counted", entry=ProbabilityEntry(0.5))
    its = pst.DistributedOptimizer(counted, optim.SparseAdam(counted.parameters()))
    for words, part in (
        (r"1000000000000 rows of 8 values, with .* fleet\.save_persistables", (moved, opt)),
        (r"'counted' has the entry .* fleet\.save_persistables", (counted, its)),
    ):
        for each in part:
            with pytest.raises(UsageError, match=words):
                each.state_dict()


def test_waiting_gradients_are_not_lost() -> None:
    """Between two pushes of gradient_merge state_dict() is refused; after a push it is whole."""
    under(gradient_merge={"k_steps": 2, "avg": True})
    model, opt = adam(net())
    dense_curve(model, [opt], dense_batches(1, 1))
    with pytest.raises(UsageError, match=r"gradients of 1 step\(s\) wait to be merged"):
        opt.state_dict()
    dense_curve(model, [opt], dense_batches(1, 1))
    assert opt.state_dict()["state"][0]["step"] == 1
    dense_curve(model, [opt], dense_batches(1, 1))
    opt.push_merged()
    assert opt.state_dict()["state"][0]["step"] == 2


def test_optimizers_that_were_converted_refuse() -> None:
    """The optimizer that convert() took refuses what would have no effect or give old state."""
    model = net()
    old = optim.Adam(model.parameters())
    state = old.state_dict()
    _, opt = pst.convert(model, old)
    for call in (
        old.step,
        old.state_dict,
        lambda: old.load_state_dict(state),
        lambda: old.add_param_group({"params": []}),
    ):
        with pytest.raises(
            UsageError, match=r"call it on the optimizer that psfleet\.torch returned"
        ):
            call()
    with pytest.raises(UsageError, match="add_param_group"):
        opt.add_param_group({"params": [torch.zeros(1)]})


@pytest.mark.long
def test_stepped_optimizers_with_embeddings() -> None:
    """convert() in the middle of training goes on as plain torch does, rows' state included."""
    data = list(batches(30))
    for name, optimizer in (("deepfm", "adam"), ("bags", "adagrad"), ("sequence", "adamw")):
        torch.manual_seed(3)
        plain = MODELS[name]()
        own = OPTIMIZERS[optimizer](plain)
        curve(plain, own, data[:10])
        model = MODELS[name]()
        model.load_state_dict(plain.state_dict())
        mine = OPTIMIZERS[optimizer](model)
        for one, other in zip(mine, own, strict=True):
            one.load_state_dict(copy.deepcopy(other.state_dict()))
        expected = curve(plain, own, data[10:])
        model, opt = pst.convert(model, mine, runtime=EmbeddedRuntime())
        np.testing.assert_allclose(curve(model, [opt], data[10:]), expected, rtol=1e-5)
        assert len(tables_of(plain)) + len(dense_of(plain)) == len(opt.state_dict()["state"])


def rows_parameter(value: np.ndarray[Any, Any]) -> Parameter:
    """A sparse parameter that a script makes with a value, in each of its incarnations."""
    return Parameter("rows", value, sparse=True)


def test_second_incarnation_of_a_worker_keeps_what_the_first_has_trained() -> None:
    """Neither psfleet.torch nor psfleet.optimizer writes first values over trained ones.

    The first incarnation is left as a crash leaves it: without goodbye, with its seat taken by the second.
    """
    torch.manual_seed(3)
    start = MODELS["sequence"]()
    first = np.ones((20, 3), np.float32)
    with nothing_left(), LocalFleet(2, 1, in_process=True) as fleet:
        dead = fleet.connect(0, "sync")
        model = copy.deepcopy(start)
        model, opt = pst.convert(model, OPTIMIZERS["adam"](model), runtime=dead)
        curve(model, [opt], batches(3))
        current().use(dead)
        rows = rows_parameter(first)
        sgd = fleet_optimizer.SGD(0.5, parameters=[rows])
        sgd.apply_gradients([(rows, SparseGrad(np.array([4]), np.ones((1, 3), np.float32)))])
        trained, trained_rows = model.state_dict(), rows.numpy().copy()

        living = fleet.connect(0, "sync")
        current().use(living)
        again = copy.deepcopy(start)
        again, opt = pst.convert(again, OPTIMIZERS["adam"](again), runtime=living)
        for name, value in again.state_dict().items():
            assert torch.equal(value, trained[name]), name
        assert not torch.equal(
            trained["towers.user.weight"], start.get_parameter("towers.user.weight")
        )
        rows = rows_parameter(first)
        sgd = fleet_optimizer.SGD(0.5, parameters=[rows])
        sgd.apply_gradients([(rows, SparseGrad(np.array([4]), np.ones((1, 3), np.float32)))])
        assert rows.numpy()[4].tolist() == [0, 0, 0]
        assert trained_rows[4].tolist() == [0.5, 0.5, 0.5]
        with contextlib.suppress(Fenced):
            dead.close()
        living.close()
