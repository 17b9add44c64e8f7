"""Stand-in for an embedding's weight, with torch's sparse gradients but without the rows.

Torch's optimizers, hooks and `zero_grad` work on parameters and their `.grad`. TableWeight is such a
parameter: it takes no memory, and its sparse gradient is built by a custom autograd function from the rows
that were pulled.
"""

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
_ROOM = (
    2**31
)  # shape[0] of a weight whose ids are any int64: maximum number of looked-up ids between steps
_MOST = 2**30  # numbers of bags start again from 0 before they reach this


def refuse_graph() -> None:
    """Raise a UsageError that says why the model cannot be exported as a graph."""
    raise UsageError(_REASON)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that torch.compile calls it between its graphs, and exporting a graph fails with a
    reason.

    Raises:
        UsageError: The returned function is called during an export.
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
    """Parameter in the shape of an embedding's weight. It takes no memory and reads as NaN.

    Optimizers and `model.parameters()` see this in place of the weight. Its `.grad` is a sparse tensor,
    like that of `nn.Embedding(sparse=True)`, so accumulation, `zero_grad` and hooks are torch's own.
    `detach()` pulls the rows, so that averages of a model (torch.optim.swa_utils) get real values.
    """

    source: Callable[[], Tensor | None] = staticmethod(lambda: None)
    """Function that pulls all rows, or returns None if there is no table or its number of rows is not
    fixed."""

    @staticmethod
    def __new__(cls, rows: int | None, dim: int, requires_grad: bool = True) -> "TableWeight":
        # A single NaN with strides of 0: the tensor has any shape and takes 4 bytes.
        data = torch.full((1, 1), float("nan")).expand(_ROOM if rows is None else rows, dim)
        weight: TableWeight = torch.Tensor._make_subclass(cls, data, requires_grad)
        return weight

    def detach(self) -> Tensor:
        """Return the present rows of the servers, float32 [rows, dim], or NaN while the table does not
        exist."""
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
    """Maps the indices of a weight's sparse gradient to ids.

    If the number of rows is fixed, the index is the id, as in torch. If ids are any int64, torch's indices
    are too narrow. The index is then a running number of looked-up ids, and this object keeps the id of
    each number, with its shows and clicks:

        look-ups        [9, 70]   [-3]          ids of any int64
        indices          0  1      2            what torch's sparse gradient has
        _ids            [9, 70, -3]             id of each index
    """

    def __init__(self, weight: TableWeight, bounded: bool) -> None:
        self._weight = weight
        self._bounded = bounded
        self._ids: list[Ids] = []
        self._scores: list[Floats] = []
        self._count = 0

    def indices(self, ids: Ids, scores: Floats | None = None) -> Ids:
        """Return the indices of these ids in the sparse gradient.

        Args:
            ids: int64 [n].
            scores: Shows and clicks of each id, float32 [n, 2], for a table that counts them.
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
        """Return the weight's `.grad`, or None if it has none. Ids that no gradient uses are dropped."""
        grad = self._weight.grad
        indices = None if grad is None else grad._indices()[0].cpu().numpy()
        if self._bounded:
            return None if grad is None or indices is None else SparseGrad(indices, _values(grad))
        if grad is None or indices is None:
            self._ids, self._scores, self._count = [], [], 0
            return None
        # Number the ids that the gradient uses from 0 again. Otherwise look-ups without a backward pass would
        # make `_ids` grow for as long as gradients accumulate.
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
    """Autograd function from the weight to rows that were pulled."""

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
    """Return pulled rows as a tensor, float32 [*ids.shape, dim], whose gradient flows to the weight.

    Args:
        weight: The stand-in.
        rows: Pulled rows. The result shares their memory.
        ids: Ids of the rows.
        ledger: The weight's map from indices to ids.
        padding: Id that gets no gradient, or None.
        device: Device of the result.
        scores: Shows and clicks of each id, float32 [n, 2], or None if the table does not count them.
    """
    out: Tensor = _LookUp.apply(weight, rows, ids, ledger, padding, device, scores)  # type: ignore[no-untyped-call]
    return out


def as_tensor(array: Floats) -> Tensor:
    """Return the array as a tensor: a view of its memory, or a copy if the array is read-only."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _values(grad: Tensor) -> Floats:
    values: Floats = grad._values().detach().cpu().numpy()
    return values


class GradientBags:
    """Maps the indices of a weight's sparse gradient to bags, for pooled rows of a table whose ids are any
    int64.

    Like GradientIds, but an index is the running number of a bag.
    """

    def __init__(self, weight: TableWeight) -> None:
        self._weight = weight
        self._of: list[PooledIds] = []
        self._first = 0  # the number of the first bag

    def __bool__(self) -> bool:
        """Return whether any bag is kept for a gradient."""
        return bool(self._of)

    def sparse(self, gradient: PooledGradient) -> Tensor:
        """Return the sparse gradient of the weight for a pooled gradient."""
        first = self._first + sum(map(len, self._of))
        self._of.append(gradient.of)
        return _sparse(self._weight, first, gradient.values)

    def gradient(self) -> PooledGradient | None:
        """Return the weight's `.grad`, or None if it has none. Bags that no gradient uses are dropped."""
        grad = self._weight.grad
        if grad is None:
            self._of, self._first = [], 0
            return None
        indices = grad._indices()[0].cpu().numpy()
        values = grad._values().detach().cpu().numpy()
        # Bags are numbered in order, so bags below the lowest index belong to steps whose gradient was reset.
        lowest = indices.min(initial=_MOST)
        while len(self._of) > 1 and lowest >= self._first + len(self._of[0]):
            self._first += len(self._of.pop(0))
        gradient = PooledGradient(joined_ids(self._of), values)
        ends = self._first, self._first + len(gradient.of)
        # Usually the gradient has exactly the kept bags, in order, and stays as it is. If bags are missing or
        # doubled, or the numbers get large, both are numbered from 0 again.
        if not np.array_equal(indices, np.arange(*ends)):
            gradient = _chosen(gradient, indices - self._first)
        elif ends[1] < _MOST:
            return gradient
        self._of, self._first = [gradient.of], 0
        self._weight.grad = _sparse(self._weight, 0, gradient.values)
        return gradient


def _chosen(gradient: PooledGradient, indices: NDArray[np.int64]) -> PooledGradient:
    """Return the part of a pooled gradient that belongs to the bags with these numbers."""
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
