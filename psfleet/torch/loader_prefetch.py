"""prefetch(): batches from a loader, with the rows of the next one brought by the step before it."""

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
    """The loader's batches. Each `step()` also brings the rows that the next batch looks up.

    So a step costs one push and one pull, however many embeddings the model has. The next batch is
    read between the two: the values, and what every worker does in which order, are those without
    prefetching, in every mode.

    Which tensors of a batch are looked up in which table is learned from the batch before: a tensor
    that is in the batch (at any depth of tuples, lists and dicts), reshaped or not, or a part of its
    columns or rows, as in `x[:, 3]`, `x[:, 2:5]` or a micro-batch. Ids that are computed from the batch
    are not found; name them with `ids`. A guess that is wrong costs a pull and does no harm.

    Args:
        loader: Any iterable, such as a DataLoader.
        ids: Given a batch, the lookups to come: {module: ids}.
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
    """Columns and rows of a tensor in a batch: where the tensor is, and where in it the ids are.

    Attributes:
        path: Keys and indices from the batch to the tensor.
        columns: The tensor's shape but for the first axis.
        offset: From the first element of a row of the tensor to the first id in it.
        shape: Shape of the ids, without its first axis.
        strides: Strides of the ids; empty where they are the whole tensor in another shape.
        rows: From where to where, if not all: the ids of a micro-batch.
    """

    path: tuple[Any, ...]
    columns: tuple[int, ...]
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: tuple[int, int] | None = None

    @staticmethod
    def find(batch: Any, ids: Tensor) -> "_Part | None":
        """Find the ids in the batch; None: they are not in it."""
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
        """The same part of another batch; None: it has no such part."""
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
    """The watcher of one loop over a loader."""

    def __init__(self, batches: Iterator[Any], choose: Chooser | None) -> None:
        self._batches = batches
        self._choose = choose
        self.batch: Any = _END
        self._following: Any = _UNREAD
        self._parts: dict[int, list[_Part]] = {}

    def turn(self) -> bool:
        """Go on to the next batch; False: there is none."""
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
        """The loop is over."""
        self.batch = self._following = _END
        for rows in living_rows():
            if rows.watcher is self:
                rows.watcher = None

    def _next(self) -> Any:
        # Not before it is needed: the loader may wait for other workers at its end (fleet.shard).
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
    """Every tensor in a batch with its place."""
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
