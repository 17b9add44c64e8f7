"""TableWeight: a torch parameter in place of an embedding's weight, whose rows are on the servers.

Torch's optimizers, hooks and `zero_grad` work on parameters and their `.grad`. A TableWeight takes no
memory. A custom autograd function gives it a sparse gradient for the rows that were pulled.
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
from psfleet.core.engine.kernels.bags import RowBags
from psfleet.core.engine.runtime_interface import PooledIds, joined_ids
from psfleet.torch.device_tensors import device_gradient

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
_ROOM = (
    2**31
)  # shape[0] of a weight whose ids are any int64: maximum number of looked-up ids between steps
_MOST = 2**30  # bags are renumbered from 0 before their numbers reach this


def refuse_graph() -> None:
    """Raise the UsageError for a model that is exported as a graph."""
    raise UsageError(_REASON)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that torch.compile does not trace it, and that it fails with a clear message in an
    export.

    Raises:
        UsageError: The wrapped function is called during an export of a graph.
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
    """Parameter with the shape of an embedding's weight, but without its memory. All its values are NaN.

    Optimizers and `model.parameters()` see this object in place of the weight. Its `.grad` is a sparse
    tensor as for `nn.Embedding(sparse=True)`, so `zero_grad`, hooks and the sum over several backward
    passes work as in torch. `detach()` pulls the rows, so that averages of a model (torch.optim.swa_utils)
    get real values.
    """

    source: Callable[[], Tensor | None] = staticmethod(lambda: None)
    """Function that pulls all rows. Returns None if there is no table, or if the number of rows is
    not fixed.
    """

    @staticmethod
    def __new__(cls, rows: int | None, dim: int, requires_grad: bool = True) -> "TableWeight":
        # One NaN with strides of 0 fills a tensor of any shape and takes 4 bytes.
        data = torch.full((1, 1), float("nan")).expand(_ROOM if rows is None else rows, dim)
        weight: TableWeight = torch.Tensor._make_subclass(cls, data, requires_grad)
        return weight

    def detach(self) -> Tensor:
        """Return the present rows from the servers, float32 [rows, dim]. Before the table exists,
        return NaN.
        """
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
    """Map from the indices of a weight's sparse gradient to ids.

    If the number of rows is fixed, an index is the id itself, as in torch. If ids are any int64, torch's
    indices are too narrow for them. Then lookups number their ids from 0, the number is the index, and this
    object keeps the id of each number, with its shows and clicks:

        lookups         [9, 70]   [-3]          ids of any int64
        indices          0  1      2            indices in torch's sparse gradient
        _ids            [9, 70, -3]             id of each index

    Attributes:
        on_device: True if the weight is on the GPU that has the table, so that gradients can stay there.
    """

    on_device = False

    def __init__(self, weight: TableWeight, bounded: bool) -> None:
        self._weight = weight
        self._bounded = bounded
        self._ids: list[Tensor] = []
        self._scores: list[Floats] = []
        self._count = 0

    def indices(self, ids: Tensor, scores: Floats | None = None) -> Tensor:
        """Number newly looked-up ids, and return their indices in the sparse gradient.

        Args:
            ids: int64 [n], on the weight's device.
            scores: Shows and clicks of each id, float32 [n, 2], for a table that counts them.
        """
        if self._bounded:
            return ids
        first = self._count
        self._ids.append(ids)
        if scores is not None:
            self._scores.append(scores)
        self._count += len(ids)
        return torch.arange(first, self._count, device=ids.device)

    def gradient(self) -> SparseGrad | None:
        """Return the weight's `.grad` by ids, or None if it has none, and forget ids that the gradient does
        not use.
        """
        grad = self._weight.grad
        if grad is None:
            self._ids, self._scores, self._count = [], [], 0
            return None
        indices, values = grad._indices()[0], grad._values().detach()
        if self._bounded:
            return self._made(indices, values, None)
        # Renumber the ids that the gradient uses from 0. Otherwise lookups without a backward pass would
        # make `_ids` grow for as long as gradients accumulate.
        # In a small step, `cat` and indexing by [] would take 20 us together.
        known = self._ids[0] if len(self._ids) == 1 else torch.cat(self._ids) if self._ids else None
        ids = indices if known is None else known.index_select(0, indices)
        scores = np.concatenate(self._scores)[indices.numpy()] if self._scores else None
        self._ids, self._count = [ids], len(ids)
        self._scores = [] if scores is None else [scores]
        self._weight.grad = _sparse(self._weight, 0, values)
        return self._made(ids, values, scores)

    def _made(self, ids: Tensor, values: Tensor, scores: Floats | None) -> SparseGrad:
        if self.on_device and scores is None and values.dtype == torch.float32:
            return device_gradient(ids, values)
        return SparseGrad(ids.cpu().numpy(), values.cpu().numpy(), scores)


class _LookUp(torch.autograd.Function):
    """Autograd function from the weight to pulled rows, whose backward pass gives the weight a sparse
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        rows: Callable[[], Tensor],
        ids: Tensor,
        ledger: GradientIds,
        padding: int | None,
        scores: Floats | None,
    ) -> Tensor:
        ctx.ids, ctx.ledger, ctx.padding, ctx.shape = ids, ledger, padding, weight.shape
        ctx.scores, ctx.device = scores, weight.device
        return rows()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ids, scores = ctx.ids.reshape(-1).to(ctx.device), ctx.scores
        values = grads[0].reshape(len(ids), ctx.shape[1]).to(ctx.device)
        if ctx.padding is not None:
            real = torch.nonzero(ids != ctx.padding).flatten()
            if len(real) < len(ids):
                ids, values = ids[real], values[real]
                scores = None if scores is None else scores[real.numpy()]
        indices = ctx.ledger.indices(ids, scores)[None]
        sparse = torch.sparse_coo_tensor(indices, values, ctx.shape, check_invariants=False)
        return sparse, None, None, None, None, None


def look_up(
    weight: TableWeight,
    rows: Callable[[], Tensor],
    ids: Tensor,
    ledger: GradientIds,
    padding: int | None,
    scores: Floats | None = None,
) -> Tensor:
    """Return pulled rows as a tensor, float32 [*ids.shape, dim], with a gradient that goes to the weight.

    Args:
        rows: Returns the rows as a tensor. A function, because an autograd function that returns a tensor
            argument makes a view of it, which a model may not change in place.
        ids: int64 ids of the rows.
        ledger: Map of the weight from indices to ids.
        padding: Id that gets no gradient, or None.
        scores: Shows and clicks of each id, float32 [n, 2], or None if the table does not count them.
    """
    out: Tensor = _LookUp.apply(weight, rows, ids, ledger, padding, scores)  # type: ignore[no-untyped-call]
    return out


def as_tensor(array: NDArray[Any]) -> Tensor:
    """Return the array as a tensor: a view of its memory, or a copy if the array is read-only."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class GradientBags:
    """Map from the indices of a weight's sparse gradient to bags, for a table whose rows are pooled.

    Works like GradientIds for ids of any int64, but numbers bags, each of which has one pooled row.
    """

    def __init__(self, weight: TableWeight) -> None:
        self._weight = weight
        self._of: list[PooledIds] = []
        self._first = 0  # number of the first remembered bag

    def __bool__(self) -> bool:
        """True if there are bags for which a gradient may come."""
        return bool(self._of)

    def sparse(self, gradient: PooledGradient) -> Tensor:
        """Number the bags of a pooled gradient, and return the gradient as a sparse tensor for the weight."""
        first = self._first + sum(map(len, self._of))
        self._of.append(gradient.of)
        return _sparse(self._weight, first, as_tensor(gradient.values))

    def gradient(self) -> PooledGradient | None:
        """Return the weight's `.grad` by bags, or None if it has none, and forget bags that the gradient
        does not use.
        """
        grad = self._weight.grad
        if grad is None:
            self._of, self._first = [], 0
            return None
        indices = grad._indices()[0].cpu().numpy()
        values = grad._values().detach().cpu().numpy()
        # Bags are numbered in ascending order, so bags below the lowest index belong to steps whose
        # gradient was reset.
        lowest = indices.min(initial=_MOST)
        while len(self._of) > 1 and lowest >= self._first + len(self._of[0]):
            self._first += len(self._of.pop(0))
        gradient = PooledGradient(joined_ids(self._of), values)
        ends = self._first, self._first + len(gradient.of)
        # Usually the gradient has exactly the remembered bags in ascending order, and needs no change. If
        # bags are missing or doubled, or numbers get large, renumber the bags of the gradient from 0.
        if not np.array_equal(indices, np.arange(*ends)):
            gradient = _chosen(gradient, indices - self._first)
        elif ends[1] < _MOST:
            return gradient
        self._of, self._first = [gradient.of], 0
        self._weight.grad = _sparse(self._weight, 0, as_tensor(gradient.values))
        return gradient


def _chosen(gradient: PooledGradient, indices: NDArray[np.int64]) -> PooledGradient:
    """Return a pooled gradient for the bags with these numbers only. A bag that is numbered twice gets both
    gradients.
    """
    of, mask = gradient.of, np.zeros(len(gradient.of), np.bool_)
    mask[indices] = True
    whole = np.zeros((len(of), gradient.values.shape[1]), np.float32)
    np.add.at(whole, indices, gradient.values)
    lengths = np.concatenate([part.lengths for part in of.parts])
    keep = np.repeat(mask, lengths)
    ids, rows = of.ids[keep], PooledGradient(of, whole).rows[keep]
    return PooledGradient(PooledIds(ids, (RowBags(np.ones(len(ids), np.int64)),)), rows)


def _sparse(weight: TableWeight, first: int, values: Tensor) -> Tensor:
    indices = torch.arange(first, first + len(values), device=weight.device)[None]
    values = values.to(weight.device)
    return torch.sparse_coo_tensor(indices, values, weight.shape, check_invariants=False)
