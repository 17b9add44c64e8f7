"""prefetch(): pulls the rows of a loader's next batch together with the push of the current step.

Without it, a model with k embeddings waits for k pulls in each forward pass. _Ahead predicts the next
lookups: it watches which part of the current batch each embedding looks up (`note`), and takes the same
part of the next batch (`expected`). A wrong prediction costs one pull in the forward pass and changes no
value. Everything runs in the script's thread.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from psfleet.core.base.errors import UsageError
from psfleet.core.base.validation.annotations import checked
from psfleet.core.engine.gradient_checks import as_ids
from psfleet.torch.embedding_rows import EmbeddingRows, living_rows
from psfleet.torch.embeddings import TableModule

B = TypeVar("B")
Ids = NDArray[np.int64]
Chooser = Callable[[Any], Mapping[TableModule, Tensor]]


@checked
def prefetch(loader: Iterable[B], ids: Chooser | None = None) -> Generator[B, None, None]:
    """Yield the loader's batches, and make each `step()` also pull the rows that the next batch needs.

        for x, y in pst.prefetch(loader):
            loss(model(x), y).backward()
            opt.step()
            opt.zero_grad()

    A step then costs one push and one pull, however many embeddings the model has. The next batch is read
    between the two. In every mode, all values and the order of each worker's operations are the same as
    without prefetch().

    prefetch() predicts the lookups of a batch from those of the batch before. For this it must find the ids
    in the batch. It recognizes any tensor of the batch, at any depth of tuples, lists and dicts. The ids
    may be that tensor in another shape, or some of its columns or rows: `x[:, 3]`, `x[:, 2:5]` or a
    micro-batch. It cannot recognize ids that are computed from the batch, so name these with `ids`. A wrong
    prediction costs one pull and does no harm.

        for x, y in pst.prefetch(loader, lambda batch: {users: batch[0] % 1000}):
            ...

    Args:
        loader: Any iterable, such as a DataLoader.
        ids: Function from a batch to the lookups that its forward pass will make, {module: ids}. None means
            that prefetch() predicts them.

    Raises:
        UsageError: Another prefetch() loop of this process has not ended.
    """
    ahead = _Ahead(iter(loader), ids)
    try:
        while ahead.turn():
            yield ahead.batch
    finally:
        ahead.end()


_END, _UNREAD = cast(Any, object()), cast(Any, object())


@dataclass(frozen=True, slots=True)
class _Part:
    """Position of looked-up ids in a batch: a tensor of the batch, and the part of this tensor.

    Views in torch share memory, so `x[:, 2:4]` is recognized by its memory: same storage as `x`, same
    stride of the first axis, and an offset of 2 from the start of a row.

    Attributes:
        path: Keys and indices that lead from the batch to the tensor.
        columns: Shape of the tensor without its first axis.
        offset: Number of elements from the start of a row of the tensor to the first id in this row.
        shape: Shape of the ids without their first axis.
        strides: Strides of the ids, or () if the ids are the whole tensor in another shape.
        rows: First row of the part and end of its rows, for a micro-batch, or None for all rows.
    """

    path: tuple[Any, ...]
    columns: tuple[int, ...]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: tuple[int, int] | None = None

    @staticmethod
    def find(batch: Any, ids: Tensor) -> "_Part | None":
        """Return the position of the ids in the batch, or None if they are not a part of the batch."""
        for path, tensor in _tensors(batch, ()):
            if tensor.dtype != ids.dtype or tensor.dim() == 0 or ids.dim() == 0 or ids.numel() == 0:
                continue
            if tensor.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr():
                continue
            columns, shape = tuple(tensor.shape[1:]), tuple(ids.shape[1:])
            if tensor.stride(0) == ids.stride(0) > 0:
                offset = int(ids.storage_offset() - tensor.storage_offset())
                start, offset = divmod(offset, tensor.stride(0))
                if 0 <= start <= start + len(ids) <= len(tensor):
                    rows = (start, start + len(ids)) if len(ids) < len(tensor) else None
                    return _Part(path, columns, offset, shape, ids.stride(), rows)
            if tensor.numel() == ids.numel() and tensor.is_contiguous() and ids.is_contiguous():
                return _Part(path, columns, 0, shape, ())
        return None

    def of(self, batch: Any) -> Tensor | None:
        """Return the tensor at this position in another batch, or None if that batch has none."""
        for path, tensor in _tensors(batch, ()):
            if path == self.path:
                return self._cut(tensor)
        return None

    def _cut(self, tensor: Tensor) -> Tensor | None:
        if tensor.dim() == 0 or tuple(tensor.shape[1:]) != self.columns:
            return None
        if not self.strides:
            fits = tensor.numel() % max(math.prod(self.shape), 1) == 0
            return tensor.reshape(-1, *self.shape) if fits else None
        start, end = self.rows or (0, len(tensor))
        if tensor.stride(0) != self.strides[0] or end > len(tensor):
            return None
        return torch.as_strided(
            tensor,
            (end - start, *self.shape),
            self.strides,
            tensor.storage_offset() + start * tensor.stride(0) + self.offset,
        )


class _Ahead:
    """Predictor of the lookups of the next batch in one loop over a loader, from those of the
    current batch.
    """

    def __init__(self, batches: Iterator[Any], choose: Chooser | None) -> None:
        self._batches = batches
        self._choose = choose
        self.batch: Any = _END
        self._following: Any = _UNREAD
        self._parts: dict[int, list[_Part]] = {}

    def turn(self) -> bool:
        """Advance `batch` to the next batch. Returns False if the loader has ended."""
        self.batch, self._following = self._next(), _UNREAD
        self._parts = {}
        for rows in living_rows():
            if rows.watcher not in (None, self):
                raise UsageError(
                    "two prefetch() loops run at the same time; finish or close the first"
                )
            rows.watcher = self
        return self.batch is not _END

    def end(self) -> None:
        """End the loop and stop watching, so that another loop may begin."""
        self.batch = self._following = _END
        for rows in living_rows():
            if rows.watcher is self:
                rows.watcher = None

    def _next(self) -> Any:
        # Read the next batch as late as possible: at its end, a loader of `fleet.shard` may wait for other
        # workers, which must have this worker's push by then.
        if self._following is _UNREAD:
            self._following = next(self._batches, _END)
        return self._following

    def note(self, rows: EmbeddingRows, ids: Tensor) -> None:
        if self._choose is None:
            part = _Part.find(self.batch, ids)
            parts = self._parts.setdefault(id(rows), [])
            if part is not None and part not in parts:
                parts.append(part)

    def expected(self, rows: EmbeddingRows) -> list[Ids]:
        following = self._next()
        if following is _END:
            return []
        if self._choose is not None:
            lookups = self._choose(following)
            return [_ids(ids) for module, ids in lookups.items() if module.table is rows]
        tensors = [part.of(following) for part in self._parts.get(id(rows), [])]
        return [_ids(ids) for ids in tensors if ids is not None]


def _tensors(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield each tensor in a batch, after its path of keys and indices."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, (*path, index))


def _ids(ids: Tensor) -> Ids:
    return as_ids(ids.detach().cpu().numpy(), "prefetch")
