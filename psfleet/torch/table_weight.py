"""The stand-in for an embedding's weight, its sparse gradients, and what torch must run untraced."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.gradients import PooledGradient, SparseGrad
from psfleet.core.engine.interface import PooledIds, joined_ids
from psfleet.core.engine.kernels.bags import RowBags

P = ParamSpec("P")
R = TypeVar("R")

_REASON = (
    "a graph cannot read the values of a converted model, which are on the servers; give torch.export or "
    "torch.jit.trace (torch.jit.script takes no hooks) copy.deepcopy(model), a plain torch model with the "
    "values of now"
)
_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.7
_tracing: Callable[[], bool] = cast(Any, torch.jit).is_tracing
_disable: Any = torch.compiler.disable
_NAMED = {"reason": _REASON} if "reason" in inspect.signature(_disable).parameters else {}


Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
_ROOM = 2**31  # lookups between two steps that a table without a number of rows can tell apart
_MOST = 2**30  # numbers of bags begin anew before they get there


def refuse_graph() -> None:
    """Say why the model cannot become a graph."""
    raise UsageError(_REASON)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which torch.compile calls between its graphs, and which no exported graph can have.

    Raises:
        UsageError: It is called to make a graph.
    """

    @functools.wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        if _tracing() or _exporting():
            refuse_graph()
        for value in (*arguments, *options.values()):
            if isinstance(value, torch.fx.Proxy):
                refuse_graph()
        return function(*arguments, **options)

    opaque: Callable[P, R] = _disable(run, **_NAMED)
    return opaque


class TableWeight(nn.Parameter):
    """Has the shape of the weight whose rows are on the servers, takes no memory and reads as NaN.

    `detach()` brings the rows, so that averages of a model (torch.optim.swa_utils) are of real values.

    It is what optimizers and `model.parameters()` see. Its `.grad` is a sparse tensor, as that of
    `nn.Embedding(sparse=True)`, so accumulating, `zero_grad` and hooks are torch's own.
    """

    source: Callable[[], Tensor | None] = staticmethod(lambda: None)
    """Brings the rows; None: there is no table of so many rows."""

    @staticmethod
    def __new__(cls, rows: int | None, dim: int, requires_grad: bool = True) -> "TableWeight":
        data = torch.full((1, 1), float("nan")).expand(_ROOM if rows is None else rows, dim)
        weight: TableWeight = torch.Tensor._make_subclass(cls, data, requires_grad)
        return weight

    def detach(self) -> Tensor:
        """The rows that the servers have now, float32 [rows, dim]; NaN while there is no table."""
        value = self.source()
        return super().detach() if value is None else value

    def __deepcopy__(self, memo: dict[int, Any]) -> "TableWeight":
        if id(self) not in memo:
            memo[id(self)] = TableWeight(self.shape[0], self.shape[1], self.requires_grad)
        twin: TableWeight = memo[id(self)]
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return TableWeight, (self.shape[0], self.shape[1], self.requires_grad)


class GradientIds:
    """Id behind each index of a weight's sparse gradient.

    With a known number of rows the index is the id, as in torch. For "any id" torch has no index
    wide enough (ids are any int64), so the index is the number of the lookup and the ledger keeps
    the ids, and how often they were shown and clicked.
    """

    def __init__(self, weight: TableWeight, bounded: bool) -> None:
        self._weight = weight
        self._bounded = bounded
        self._ids: list[Ids] = []
        self._scores: list[Floats] = []
        self._count = 0

    def indices(self, ids: Ids, scores: Floats | None = None) -> Ids:
        """The indices under which gradients of these ids, int64 [n], go into the sparse gradient.

        Args:
            scores: Scores of a table that counts shows and clicks: float32 [n, 2].
        """
        if self._bounded:
            return ids
        first = self._count
        self._ids.append(ids)
        if scores is not None:
            self._scores.append(scores)
        self._count += len(ids)
        return np.arange(first, self._count, dtype=np.int64)

    def gradient(self) -> SparseGrad | None:
        """Return the weight's `.grad`; None where it has none.

        Ids that the gradient no longer names are forgotten.
        """
        grad = self._weight.grad
        indices = None if grad is None else grad._indices()[0].cpu().numpy()
        if self._bounded:
            return None if grad is None or indices is None else SparseGrad(indices, _values(grad))
        if grad is None or indices is None:
            self._ids, self._scores, self._count = [], [], 0
            return None
        ids = np.concatenate(self._ids)[indices] if self._ids else indices
        scores = np.concatenate(self._scores)[indices] if self._scores else None
        self._ids, self._count = [ids], len(ids)
        self._scores = [] if scores is None else [scores]
        values = grad._values()
        self._weight.grad = torch.sparse_coo_tensor(
            torch.arange(len(ids))[None], values, grad.shape, check_invariants=False
        )
        return SparseGrad(ids, _values(grad), scores)


class _LookUp(torch.autograd.Function):
    """Rows that were pulled, as a function of the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        rows: Floats,
        ids: Ids,
        ledger: GradientIds,
        padding: int | None,
        device: torch.device,
        scores: Floats | None,
    ) -> Tensor:
        ctx.ids, ctx.ledger, ctx.padding, ctx.shape = ids, ledger, padding, weight.shape
        ctx.scores = scores
        return as_tensor(rows).to(device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ids, scores = ctx.ids.reshape(-1), ctx.scores
        values = grads[0].reshape(len(ids), ctx.shape[1])
        if ctx.padding is not None:
            real = np.flatnonzero(ids != ctx.padding)
            if len(real) < len(ids):
                ids, values = ids[real], values[torch.from_numpy(real)]
                scores = None if scores is None else scores[real]
        indices = torch.from_numpy(ctx.ledger.indices(ids, scores))[None]
        sparse = torch.sparse_coo_tensor(indices, values.cpu(), ctx.shape, check_invariants=False)
        return sparse, None, None, None, None, None, None


def look_up(
    weight: TableWeight,
    rows: Floats,
    ids: Ids,
    ledger: GradientIds,
    padding: int | None,
    device: torch.device,
    scores: Floats | None = None,
) -> Tensor:
    """The rows, float32 [*ids.shape, dim], so that their gradient arrives at the weight.

    Args:
        weight: The stand-in.
        rows: Pulled rows; the result shares their memory.
        ids: The rows' ids; those equal to `padding` get no gradient.
        ledger: The weight's.
        padding: An id or None.
        device: Device of the result.
        scores: Shows and clicks of each id, float32 [n, 2]; None: the table does not count.
    """
    out: Tensor = _LookUp.apply(weight, rows, ids, ledger, padding, device, scores)  # type: ignore[no-untyped-call]
    return out


def as_tensor(array: Floats) -> Tensor:
    """The array as a tensor without a copy, unless it must not be written to."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _values(grad: Tensor) -> Floats:
    values: Floats = grad._values().detach().cpu().numpy()
    return values


class GradientBags:
    """Bag behind each index of a weight's sparse gradient.

    As GradientIds, but for what was pooled of the rows of a table for any id: an index is a number of a bag.
    """

    def __init__(self, weight: TableWeight) -> None:
        self._weight = weight
        self._of: list[PooledIds] = []
        self._first = 0  # the number of the first bag

    def __bool__(self) -> bool:
        """Return whether there has been a gradient since the last one that was forgotten."""
        return bool(self._of)

    def sparse(self, gradient: PooledGradient) -> Tensor:
        """The gradient of the weight that this one makes up."""
        first = self._first + sum(map(len, self._of))
        self._of.append(gradient.of)
        return _sparse(self._weight, first, gradient.values)

    def gradient(self) -> PooledGradient | None:
        """Return the weight's `.grad`; None where it has none.

        Bags that the gradient no longer names are forgotten.
        """
        grad = self._weight.grad
        if grad is None:
            self._of, self._first = [], 0
            return None
        indices = grad._indices()[0].cpu().numpy()
        values = grad._values().detach().cpu().numpy()
        lowest = indices.min(initial=_MOST)
        while len(self._of) > 1 and lowest >= self._first + len(self._of[0]):
            self._first += len(self._of.pop(0))  # of an earlier step
        gradient = PooledGradient(joined_ids(self._of), values)
        ends = self._first, self._first + len(gradient.of)
        if not np.array_equal(indices, np.arange(*ends)):
            gradient = _chosen(gradient, indices - self._first)
        elif ends[1] < _MOST:
            return gradient
        self._of, self._first = [gradient.of], 0
        self._weight.grad = _sparse(self._weight, 0, gradient.values)
        return gradient


def _chosen(gradient: PooledGradient, indices: NDArray[np.int64]) -> PooledGradient:
    """Some of the bags, whose numbers are given with the values: the gradients of their rows."""
    of, mask = gradient.of, np.zeros(len(gradient.of), np.bool_)
    mask[indices] = True
    whole = np.zeros((len(of), gradient.values.shape[1]), np.float32)
    np.add.at(whole, indices, gradient.values)
    lengths = np.concatenate([part.lengths for part in of.parts])
    keep = np.repeat(mask, lengths)
    ids, rows = of.ids[keep], PooledGradient(of, whole).rows[keep]
    return PooledGradient(PooledIds(ids, (RowBags(np.ones(len(ids), np.int64)),)), rows)


def _sparse(weight: TableWeight, first: int, values: Floats) -> Tensor:
    indices = torch.arange(first, first + len(values))[None]
    return torch.sparse_coo_tensor(indices, as_tensor(values), weight.shape, check_invariants=False)
