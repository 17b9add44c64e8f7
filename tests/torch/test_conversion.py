"""convert(): the loss curve of single-process torch, embedded and on a fleet; what is refused."""

# torch annotates some of its methods only.
# mypy: disable-error-code="no-untyped-call"

import copy
from typing import Any

import numpy as np
import pytest

from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.errors import ConfigError, PsfleetError, ShapeError, UsageError
from psfleet.optimizer import Ftrl
from psfleet.testing.leaks import nothing_left
from psfleet.testing.local_fleet import LocalFleet

pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")

import torch  # after the check for torch

import psfleet.torch as pst
from tests.torch.models import MODELS, OPTIMIZERS, batches, curve


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_curve_of_torch(model: str, optimizer: str) -> None:
    """200 losses of a converted model are those of the same model in plain torch; so are its weights."""
    torch.manual_seed(3)
    plain = MODELS[model]()
    begin = copy.deepcopy(plain.state_dict())
    twin = copy.deepcopy(plain)
    data = list(batches(200))
    if optimizer == "momentum":
        # torch keeps the velocity of a sparse gradient as a sum of all gradients so far, whose float32
        # rounding alone takes it 1.1e-5 away from float64; psfleet stays within 5e-7 of that.
        plain = plain.double()
        reference = [
            {k: v.double() if v.is_floating_point() else v for k, v in b.items()} for b in data
        ]
        wanted = curve(plain, OPTIMIZERS[optimizer](plain), reference)
    else:
        wanted = curve(plain, OPTIMIZERS[optimizer](plain), data)
    moved, opt = pst.convert(twin, OPTIMIZERS[optimizer](twin))
    got = curve(moved, [opt], data)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    for name, value in moved.state_dict().items():
        np.testing.assert_allclose(value, plain.state_dict()[name], rtol=1e-3, atol=1e-4)
        assert not np.array_equal(value, begin[name])


@pytest.mark.parametrize("servers", [1, 2])
def test_fleet_has_the_same_bits(servers: int) -> None:
    """On servers of their own, in sync mode, all losses are those of the embedded run, bit for bit."""
    cases = [("deepfm", "adam"), ("bags", "adagrad"), ("sequence", "sgd"), ("sequence", "adamw")]
    data = list(batches(60))
    with nothing_left(), LocalFleet(servers, 1) as fleet:
        runtime = fleet.connect(0, "sync")
        for model, optimizer in cases:
            torch.manual_seed(3)
            embedded = MODELS[model]()
            remote = copy.deepcopy(embedded)
            moved, opt = pst.convert(embedded, OPTIMIZERS[optimizer](embedded), name=optimizer)
            wanted = curve(moved, [opt], data)
            moved, opt = pst.convert(
                remote, OPTIMIZERS[optimizer](remote), name=optimizer, runtime=runtime
            )
            assert curve(moved, [opt], pst.prefetch(data)) == wanted, (model, optimizer)
        runtime.close()


optim = torch.optim
DENSE = {
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "decay": lambda p: optim.SGD(p, 0.1, weight_decay=0.1),
    "nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.5, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: optim.Adagrad(p, 0.1, eps=1e-3, weight_decay=0.1),
    "amsgrad": lambda p: optim.Adam(p, 0.1, amsgrad=True, weight_decay=0.1),
    "adam": lambda p: optim.Adam(p, 0.1, betas=(0.5, 0.9), eps=0.01),
    "adamw": lambda p: optim.AdamW(p, 0.1, weight_decay=0.5),
    "nadam": lambda p: optim.NAdam(p, 0.1, weight_decay=0.1),
    "radam": lambda p: optim.RAdam(p, 0.1),
    "rmsprop": lambda p: optim.RMSprop(p, 0.1),
    "rmsprop momentum": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, weight_decay=0.1),
    "rmsprop centered": lambda p: optim.RMSprop(p, 0.01, centered=True, momentum=0.9, eps=1e-3),
    "adadelta": lambda p: optim.Adadelta(p, 1.0, rho=0.8),
}


@pytest.mark.parametrize("name", DENSE)
def test_every_dense_option(name: str) -> None:
    """Each optimizer for dense parameters follows torch with the options it has."""
    torch.manual_seed(5)
    plain = torch.nn.Linear(4, 3)
    moved = copy.deepcopy(plain)
    moved, opt = pst.convert(moved, DENSE[name](moved.parameters()))
    trained = ((plain, DENSE[name](plain.parameters())), (moved, opt))
    for _ in range(30):
        x, y = torch.randn(32, 4), torch.randn(32, 3)
        for model, optimizer in trained:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    for got, wanted in zip(moved.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


class Tied(torch.nn.Module):
    """An embedding whose weight is also that of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 3, sparse=True)
        self.head = torch.nn.Linear(3, 5)
        self.head.weight = self.table.weight


class Own(torch.nn.Embedding):
    """An embedding with a forward that convert() does not know."""


def embedding(**options: Any) -> torch.nn.Module:
    """A model of one sparse embedding."""
    return torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True, **options))


SGD, ADAM = torch.optim.SGD, torch.optim.Adam
REFUSED = [
    (embedding(max_norm=1.0), SGD, {}, ConfigError, "max_norm=1.0"),
    (embedding(scale_grad_by_freq=True), SGD, {}, ConfigError, "scale_grad_by_freq=True"),
    (torch.nn.Sequential(Own(5, 3, sparse=True)), SGD, {}, ConfigError, "Own"),
    (Tied(), SGD, {}, ConfigError, "tied to 'head', .*Linear.* with sparse=False"),
    (embedding(), ADAM, {}, ConfigError, "use Adagrad, SGD, SparseAdam"),
    (embedding(), SGD, {"weight_decay": 0.1}, ConfigError, "weight_decay is 0.1"),
    (embedding(), SGD, {"maximize": True}, ConfigError, "maximize is True"),
    (embedding(), SGD, {"momentum": 0.9, "dampening": 0.5}, ConfigError, "dampening is 0.5"),
    (embedding(), torch.optim.Adagrad, {"lr_decay": 0.5}, ConfigError, "lr_decay is 0.5"),
    (torch.nn.Linear(2, 2), torch.optim.ASGD, {}, ConfigError, "ASGD has no exact rule"),
    (
        torch.nn.Linear(2, 2),
        torch.optim.SparseAdam,
        {},
        ConfigError,
        "SparseAdam has no exact rule",
    ),
    (torch.nn.Linear(2, 2), torch.optim.AdamW, {"amsgrad": True}, ConfigError, "amsgrad is True"),
    (torch.nn.Linear(2, 2).double(), SGD, {}, UsageError, "torch.float64"),
]


@pytest.mark.parametrize(
    ("model", "kind", "options", "error", "words"), REFUSED, ids=[case[4] for case in REFUSED]
)
def test_refused(
    model: torch.nn.Module,
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    error: type[PsfleetError],
    words: str,
    fleet: EmbeddedRuntime,
) -> None:
    """What has no exact counterpart is refused with its name and value, and nothing was changed."""
    before = dict(model.named_modules())
    optimizer = kind(model.parameters(), **options)
    with pytest.raises(error, match=words):
        pst.convert(model, optimizer)
    assert dict(model.named_modules()) == before
    assert all(
        a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)
    )
    assert fleet.specs() == {}


def test_optimizers_must_fit() -> None:
    """Foreign parameters and parameters in two optimizers are refused."""
    model = torch.nn.Linear(2, 1)
    with pytest.raises(UsageError, match=r"shape \(1, 2\) that is not in the model"):
        pst.convert(model, SGD(torch.nn.Linear(2, 1).parameters(), 0.1))
    with pytest.raises(UsageError, match="'weight' is in two optimizers"):
        pst.convert(model, [SGD(model.parameters(), 0.1), SGD(model.parameters(), 0.1)])
    with pytest.raises(UsageError, match=r"it must be a torch\.optim optimizer"):
        pst.convert(model, ["sgd"])  # type: ignore[list-item]


def test_what_is_converted() -> None:
    """Shared modules stay shared, a model may be an embedding, and untrained parts stay torch's."""
    shared = torch.nn.Embedding(5, 3, sparse=True)
    frozen = torch.nn.Embedding(5, 3, sparse=True)
    model = torch.nn.ModuleList([shared, shared, frozen, torch.nn.Embedding(5, 3)])
    moved, _ = pst.convert(model, SGD([*shared.parameters(), *model[3].parameters()], 0.1))
    assert moved[0] is moved[1]
    assert isinstance(moved[0], pst.Embedding)
    assert moved[2] is frozen
    assert type(moved[3]) is torch.nn.Embedding
    alone = torch.nn.Embedding(5, 3, sparse=True)
    weight = alone.weight.detach().clone()
    bare, _ = pst.convert(alone, SGD(alone.parameters(), 0.1))
    assert torch.equal(bare(torch.arange(5)), weight)


def test_weight_without_memory() -> None:
    """A weight on the device "meta" starts from the standard normal distribution."""
    table = torch.nn.Embedding(10**9, 8, sparse=True, device="meta")
    moved, _ = pst.convert(table, torch.optim.SparseAdam(table.parameters()))
    rows = moved(torch.arange(0, 10**9, 10**6)).detach()
    assert abs(float(rows.mean())) < 0.05
    assert abs(float(rows.std()) - 1) < 0.05


def test_state_dict_goes_both_ways() -> None:
    """A converted model's state dict is plain torch's, and loading one sets rows and dense values."""
    torch.manual_seed(1)
    plain, other = MODELS["bags"](), MODELS["bags"]()
    wanted = copy.deepcopy(plain.state_dict())
    moved, opt = pst.convert(plain, OPTIMIZERS["sgd"](plain))
    assert moved.state_dict().keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in moved.state_dict().items())
    moved.load_state_dict(other.state_dict())
    data = list(batches(5))
    got = curve(moved, [opt], data)
    np.testing.assert_allclose(got, curve(other, OPTIMIZERS["sgd"](other), data), rtol=1e-5)
    with pytest.raises(ShapeError, match=r"\(3, 6\) under 'mean.weight'"):
        moved.load_state_dict({"mean.weight": torch.zeros(3, 6)}, strict=False)


@pytest.mark.parametrize("given", [None, [], "sgd", Ftrl(0.1)])
def test_no_torch_optimizer(given: Any) -> None:
    """Without a torch optimizer there is nothing to convert; what is none is quoted."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"train no parameter|it must be a torch\.optim optimizer"):
        pst.convert(model, given)


def test_no_model() -> None:
    """What is no model is quoted."""
    line: Any = None
    with pytest.raises(UsageError, match=r"the model is None; it must be a torch\.nn\.Module"):
        pst.convert(line, torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1))
