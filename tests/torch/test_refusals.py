"""What psfleet.torch refuses: each with a sentence that quotes the value, and nothing was changed."""

from typing import Any

import numpy as np
import torch
from torch import nn

import psfleet.torch as pst
from psfleet import optimizer
from psfleet.core.engine.schema.entry import ProbabilityEntry
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from tests.refusals import check_refusals, named
from tests.torch import models


class Tied(nn.Module):
    """An embedding whose weight is also that of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.table.weight


class Mixed(nn.ModuleList):
    """A weight whose gradient is sparse in one module and dense in another."""

    def __init__(self) -> None:
        super().__init__([nn.Embedding(4, 2, sparse=True), nn.Embedding(4, 2)])
        self[1].weight = self[0].weight


class Own(nn.Embedding):
    """An embedding with a forward that convert() does not know."""


class Pair(nn.Module):
    """Gives what cannot be sent."""

    def forward(self, x: Any) -> Any:
        return {"x": x}


def looped() -> nn.Sequential:
    """A weight that two sections use."""
    first = nn.Linear(3, 3)
    return nn.Sequential(first, nn.ReLU(), first)


def table(kind: Any = nn.Embedding, sparse: bool = True, **options: Any) -> nn.Module:
    """A model of one embedding."""
    return nn.Sequential(kind(5, 3, sparse=sparse, **options))


def line() -> nn.Module:
    return nn.Linear(2, 2)


def stacked() -> tuple[nn.Module, pst.DistributedOptimizer]:
    """A model of one layer that is converted."""
    model = nn.Sequential(nn.Linear(2, 2))
    return pst.convert(model, torch.optim.SGD(model.parameters(), 0.1))


def convert(model: Any, kind: Any = torch.optim.SGD, servers: Any = None, **options: Any) -> None:
    """Convert a model; nothing may be changed when that is refused."""
    before, own = dict(model.named_modules()), kind(model.parameters(), **options)
    try:
        pst.convert(model, own, servers=servers)
    finally:
        assert dict(model.named_modules()) == before
        kept = zip(own.param_groups[0]["params"], model.parameters(), strict=True)
        assert all(a is b for a, b in kept)


CONVERSIONS = """
convert(table(max_norm=1.0))  # ConfigError: ...max_norm=1.0
convert(table(max_norm=0.0))  # ConfigError: ...max_norm=0.0
convert(table(sparse=False, max_norm=2.0))  # ConfigError: ...'0' has max_norm=2.0
convert(table(nn.EmbeddingBag, False, max_norm=3.0))  # ConfigError: ...'0' has max_norm=3.0
convert(table(scale_grad_by_freq=True))  # ConfigError: ...scale_grad_by_freq=True
convert(table(Own))  # ConfigError: ...Own
convert(Tied())  # ConfigError: ...tied to 'head', ...Linear... with sparse=False
convert(Mixed())  # ConfigError: ...'0' is tied to '1', whose gradients (Embedding) are dense
convert(table(), Adam)  # ConfigError: ...use Adagrad, SGD, SparseAdam
convert(table(), weight_decay=0.1)  # ConfigError: ...weight_decay is 0.1
convert(table(), maximize=True)  # ConfigError: ...maximize is True
convert(table(), momentum=0.9, dampening=0.5)  # ConfigError: ...dampening is 0.5
convert(table(), torch.optim.Adagrad, lr_decay=0.5)  # ConfigError: ...lr_decay is 0.5
convert(line(), torch.optim.ASGD)  # ConfigError: ...ASGD has no exact rule
convert(line(), torch.optim.SparseAdam)  # ConfigError: ...SparseAdam has no exact rule
convert(line(), torch.optim.AdamW, amsgrad=True)  # ConfigError: ...amsgrad is True
convert(line().double())  # UsageError: ...torch.float64
convert(table(), servers={"b": 1})  # servers has 'b'; the embeddings that become tables are '0'
convert(table(), servers={"0": 0})  # servers is 0, it must be a whole number in [1, 1024]
pst.convert(line(), SGD(nn.Linear(2, 1).parameters(), 0.1))  # UsageError: ...shape (1, 2) that is not in the model
pst.convert(one, [SGD(one.parameters(), 0.1), SGD(one.parameters(), 0.1)])  # UsageError: ...'weight' is in two optimizers
pst.convert(line(), ["sgd"])  # it must be a torch.optim optimizer
pst.convert(line(), None)  # train no parameter
pst.convert(line(), [])  # train no parameter
pst.convert(line(), "sgd")  # it must be an Optimizer of torch
pst.convert(line(), optimizer.Ftrl(0.1))  # it must be an Optimizer of torch
pst.convert(*converted)  # UsageError: '0.weight' of the model has an optimizer already: the model was converted before
pst.convert(converted[0], SGD(converted[0].parameters(), 0.1))  # UsageError: '0.weight' of the model has an optimizer already
pst.DistributedOptimizer(*converted)  # UsageError: '0.weight' of the model has an optimizer already
halved(torch.ones(1, 2))  # UsageError: parameter '0.weight~2' has become torch.float16, and servers hold torch.float32; leave out .half()
pst.convert(None, SGD(line().parameters()))  # model is None, it must be a Module of torch
"""
EMBEDDINGS = """
pst.Embedding(10, 2)(torch.tensor([1]))  # UsageError: ...has no table yet
bounded(torch.tensor([1, 10]))  # IdError: ...rows 0 to 9; id 10
bounded(torch.tensor([-1]))  # IdError: ...id -1
bounded(torch.tensor([1.0]))  # IdError: ...float32
pst.Embedding(10, 2, padding_idx=10)  # ConfigError: ...padding_idx is 10; it must be in [-10, 10)
pst.EmbeddingBag(10, 2, mode="min")  # ConfigError: ...mode is 'min'
pst.EmbeddingBag(10, 2, entry=ProbabilityEntry(0.25))  # ConfigError: ...rows 0 to 9 has all of them...num_embeddings=None
pst.DistributedOptimizer(pst.Embedding(10, 2))  # UsageError: ...no optimizer has the embedding
pst.DistributedOptimizer(nn.ModuleList([pst.Embedding(9, 2, name="a") for _ in "12"]))  # UsageError: ...two embeddings are named 'a'
pst.DistributedOptimizer(bounded, SGD(bounded.parameters(), 1.0))  # UsageError: ...has an optimizer already
pst.Embedding(4, 2, optimizer=optimizer.SGD(0.1, grad_clip=optimizer.ClipGradByNorm(1.0)))  # grad_clip
pst.Embedding(4, 2, optimizer=optimizer.LookAhead(optimizer.SGD(0.1)))  # LookAhead
pst.Embedding(4, 2, optimizer=optimizer.DGCMomentum(0.1, 0.9, 0))  # DGCMomentum
pst.Embedding(4, 2, optimizer="sgd")  # 'sgd'
pst.Embedding(0, 2)  # num_embeddings is 0
pst.Embedding(-4, 2)  # num_embeddings is -4
pst.Embedding("a", 2)  # num_embeddings is 'a'
pst.Embedding(4.5, 2)  # num_embeddings is 4.5
pst.EmbeddingBag(4, 0)  # embedding_dim is 0...it must be
pst.EmbeddingBag(4, 1025)  # embedding_dim is 1025...it must be
pst.EmbeddingBag(4, 2.5)  # embedding_dim is 2.5...it must be
pst.EmbeddingBag(4, None)  # embedding_dim is None...it must be
"""
NAMES = vars(torch.optim) | named(convert, table, line, looped, Tied, Mixed, Own, Pair)
NAMES |= named(ProbabilityEntry)
NAMES |= {"torch": torch, "nn": nn, "pst": pst, "np": np, "optimizer": optimizer}


def test_conversions(fleet: EmbeddedRuntime) -> None:
    """What has no exact counterpart is refused with its name and value, and no table is made."""
    models_before = {"converted": stacked(), "halved": stacked()[0].half()}
    tables = list(fleet.specs())
    check_refusals(CONVERSIONS, NAMES | {"one": nn.Linear(2, 1), **models_before})
    assert list(fleet.specs()) == tables


def test_embeddings() -> None:
    """So are ids, sizes and optimizers that an embedding cannot have, and wrong orders."""
    bounded = pst.Embedding(10, 2)
    pst.DistributedOptimizer(bounded, torch.optim.SGD(bounded.parameters(), 1.0))
    check_refusals(EMBEDDINGS, NAMES | {"bounded": bounded})


STRATEGIES = """
under(dgc={})  # 'dgc' puts an optimizer of psfleet
under(lars={})  # 'lars' puts an optimizer of psfleet
under(lamb={})  # 'lamb' puts an optimizer of psfleet
under(recompute={"memory_budget": "1MiB"})  # memory_budget is '1MiB'
under(recompute={"checkpoints": ["tower"]})  # no module of that name
under(recompute={"checkpoints": ["1"]})  # running statistics of '1', a BatchNorm1d
under(pipeline={"micro_batches": 2})  # train an nn.Sequential with psfleet.torch.Pipeline
"""
PIPELINES = """
begin(nn.Linear(3, 3))  # UsageError: ...the model is a Linear
begin(nn.Sequential(nn.Linear(3, 3)), cuts=[1])  # UsageError: ...cuts is [1]
begin(looped(), {"stages": 2})  # UsageError: ...'0.weight' is used in 2 sections
begin(nn.Sequential(nn.Linear(3, 3)), {"stages": 2})  # ConfigError: ...has 1 modules, too few
begin(nn.Sequential(nn.Linear(3, 3), Pair()))  # UsageError: ...module 1 gives a dict
begin(nn.Sequential(nn.Linear(3, 3)), {"copies": [2]})  # ConfigError: ...leave copies out
begin(nn.Sequential(nn.Linear(3, 3)), rows=3)  # ShapeError: ...lengths [3, 4]
begin(nn.Sequential(nn.Linear(3, 3)), loss=lambda out, y: out - y)  # ShapeError: ...the loss has the shape (4, 3)
"""


def test_strategies() -> None:
    """What torch's optimizers cannot do is refused, and the model is as it was."""

    def under(**parts: Any) -> None:
        models.under(**parts)
        convert(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))

    check_refusals(STRATEGIES, NAMES | {"under": under})


def test_pipelines() -> None:
    """So is what cannot be cut or run in micro-batches, and batches that do not fit."""

    def begin(
        model: Any,
        asked: Any = None,
        rows: int = 4,
        loss: Any = nn.functional.mse_loss,
        **options: Any,
    ) -> None:
        models.under(pipeline=asked or {})
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        pst.Pipeline(model, sgd, loss, **options).step(torch.zeros(4, 3), torch.zeros(rows, 3))

    check_refusals(PIPELINES, NAMES | {"begin": begin})


CHANGES = """
changed(SGD, weight_decay=0.1)  # UsageError: ...weight_decay changed from 0 to 0.1
changed(SGD, momentum=0.5)  # UsageError: ...momentum changed from 0 to 0.5
changed(Adam, eps=0.1)  # UsageError: ...eps changed from 1e-08 to 0.1
changed(Adam, amsgrad=True)  # UsageError: ...amsgrad changed from False to True
changed(Adam, betas=(0.5, 0.9))  # UsageError: ...betas changed from (0.9, ...only 'lr' may change
changed(torch.optim.RMSprop, alpha=0.5)  # UsageError: ...alpha changed from 0.99 to 0.5
changed(SGD, maximize=True)  # ConfigError: ...maximize is True
"""


def test_changed_options() -> None:
    """A change that cannot reach the servers is named, from what to what; a step does not happen."""

    def changed(kind: Any, **options: Any) -> None:
        model = nn.Linear(2, 1)
        _, opt = pst.convert(model, kind(model.parameters(), lr=0.1), runtime=EmbeddedRuntime())
        opt.param_groups[0].update(options)
        opt.step()

    check_refusals(CHANGES, NAMES | {"changed": changed})
