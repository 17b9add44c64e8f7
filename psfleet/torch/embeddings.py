"""Embedding and EmbeddingBag: like torch's modules, but with their rows in tables on the servers.

Both take torch's arguments and return the same values as torch's modules. In addition, `num_embeddings` may
be None. Ids are then any int64, and the first update of an id creates its row.
"""

import copy
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from psfleet.core.base.errors import ConfigError, ShapeError, UsageError
from psfleet.core.base.validation.annotations import check, checked
from psfleet.core.engine.gradient_checks import as_ids
from psfleet.core.engine.schema.entry import Entry
from psfleet.core.engine.schema.table import (
    MAX_DIM,
    Device,
    InitializerSpec,
    RowPrecision,
    ServerCount,
)
from psfleet.core.graph.program.ops.embedding import spread
from psfleet.initializer import Initializer, starting
from psfleet.optimizer.optimizer import Optimizer, check_outside
from psfleet.torch.embedding_rows import EmbeddingRows
from psfleet.torch.table_weight import untraced

Floats = NDArray[np.float32]


Mode = Literal["sum", "mean", "max"]


def scores_of(
    ids: Tensor, shows: Tensor | None, clicks: Tensor | None, ends: Tensor | None = None
) -> Floats:
    """Return the number of shows and clicks of each id, float32 [n, 2], for a table that counts them.

    Args:
        ids: Ids of a lookup, in any shape.
        shows: Number of shows, one value for each id or for each bag. None means one show for each id.
        clicks: Number of clicks, one value for each id or for each bag. None means no clicks.
        ends: For flat ids, the start of each bag and, as last entry, the number of ids.

    Raises:
        ShapeError: shows or clicks have another shape.
    """
    columns = [
        np.full(ids.numel(), default, np.float32)
        if counts is None
        else _by_id(name, ids, counts, ends)
        for name, counts, default in (("shows", shows, 1), ("clicks", clicks, 0))
    ]
    return np.stack(columns, axis=1)


def _by_id(name: str, ids: Tensor, values: Tensor, ends: Tensor | None) -> Floats:
    counts = values.detach().cpu().numpy()
    if ends is None or counts.shape == tuple(ids.shape):
        return spread(name, counts, tuple(ids.shape)).reshape(-1)
    bags = np.diff(ends.cpu().numpy())
    if counts.size != len(bags):
        raise ShapeError(
            f"{name!r} has shape {counts.shape} for {len(bags)} bags of {ids.numel()} ids; give one "
            "value for each bag or each id"
        )
    return np.repeat(counts.reshape(-1), bags).astype(np.float32)


@checked
class TableModule(nn.Module):
    """Base class of Embedding and EmbeddingBag, which saves and loads their rows.

    Attributes:
        num_embeddings: Number of rows, with ids from 0, or None if ids are any int64.
        embedding_dim: Width of a row.
        padding_idx: Id whose row gets no gradient, or None.
        weight: Parameter in place of the rows, for `parameters()` and torch's optimizers. Its values are NaN.
        optimizer: psfleet optimizer that updates the rows. None means that the torch optimizer whose
            parameter groups contain `weight` does.
    """

    weight: Tensor

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        name: str | None = None,
        initializer: InitializerSpec | Initializer | None = None,
        seed: int = 0,
        optimizer: Optimizer | None = None,
        entry: Entry | None = None,
        precision: RowPrecision = "float32",
        servers: int | None = None,
        device: Device | None = None,
    ) -> None:
        super().__init__()
        _check(num_embeddings, embedding_dim, optimizer)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = _padding(padding_idx, num_embeddings)
        self.optimizer = optimizer
        owner = "an embedding" if name is None else f"embedding {name!r}"
        start, seed = starting(initializer, (num_embeddings, embedding_dim), seed, owner)
        if entry is not None and num_embeddings is not None:
            raise ConfigError(
                f"an embedding with rows 0 to {num_embeddings - 1} has all of them; {entry} is for "
                "num_embeddings=None"
            )
        self.table = EmbeddingRows(
            name,
            num_embeddings,
            embedding_dim,
            self.padding_idx,
            start,
            seed,
            entry,
            precision,
            check(owner, "servers", servers, ServerCount | None),
            device,
        )
        self.weight = self.table.weight

    def share(self, other: "TableModule") -> None:
        """Tie this embedding to another: use its rows, and add up the gradients of both.

        Call it before the optimizer is made, which creates the table.
        """
        self.table, self.weight = other.table, other.weight

    def extra_repr(self) -> str:
        """Return the arguments that print(model) shows."""
        count = "any id" if self.num_embeddings is None else self.num_embeddings
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{count}, {self.embedding_dim}{padding}, name={self.table.name!r}"

    def _look_up(
        self, ids: Tensor, shows: Tensor | None, clicks: Tensor | None, ends: Tensor | None = None
    ) -> Tensor:
        scores = None
        if shows is not None or clicks is not None:
            if not self.table.counts:
                raise UsageError(
                    f"embedding {self.table.name!r} counts no shows and clicks; make it with "
                    "num_embeddings=None and entry=ShowClickEntry(...)"
                )
            scores = scores_of(ids, shows, clicks, ends)
        return self.table.look_up(ids, keep=self.training, padding=self.padding_idx, scores=scores)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy that is independent of this module.

        If the table exists, the copy is torch's own module with the present rows.
        """
        if not self.table.bound:
            twin = self.__class__.__new__(self.__class__)
            memo[id(self)] = twin
            twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
            return twin
        if self.num_embeddings is None:
            raise UsageError(
                f"embedding {self.table.name!r} has no number of rows, so a copy of the model cannot "
                "have rows of its own; use the model itself, or save it with fleet.save_persistables"
            )
        weight = memo.get(id(self.table))
        if weight is None:
            weight = memo[id(self.table)] = nn.Parameter(
                self.weight.detach(), self.weight.requires_grad
            )
        plain = self._plain(weight).train(self.training)
        memo[id(self)] = plain
        return plain

    def _plain(self, weight: nn.Parameter) -> nn.Module:
        """Make torch's own module of the same kind with this weight."""
        raise NotImplementedError

    # `weight` has no memory that .to(), .cuda() or .half() could move or convert, and they must not
    # allocate any.
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the rows as torch saves a weight.

        If ids are any int64, save the rows that exist, and their ids under the key `ids`, int64 [n].
        """
        ids, rows = self.table.saved()
        if ids is not None:
            destination[prefix + "ids"] = torch.from_numpy(ids)
        destination[prefix + "weight"] = torch.from_numpy(rows)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *torch_arguments: Any) -> None:
        strict, missing, unexpected = torch_arguments[1:4]
        keys = ["weight"] if self.num_embeddings is not None else ["ids", "weight"]
        lacking = [prefix + key for key in keys if prefix + key not in state_dict]
        if strict:
            module_keys = (key for key in state_dict if key.startswith(prefix))
            unexpected.extend(key for key in module_keys if key.removeprefix(prefix) not in keys)
        if lacking:
            if strict:
                missing.extend(lacking)
            return
        value, count, ids = state_dict[prefix + "weight"], self.num_embeddings, None
        if count is None:
            ids = as_ids(state_dict[prefix + "ids"].cpu().numpy(), f"{prefix}ids")
            count = len(ids)
        if value.shape != (count, self.embedding_dim):
            raise ShapeError(
                f"embedding {self.table.name!r} has the shape {(count, self.embedding_dim)}, the "
                f"state dict has {tuple(value.shape)} under {prefix + 'weight'!r}"
            )
        rows = value.detach().cpu().to(torch.float32).contiguous().numpy()
        self.table.client.exclusively(lambda: self.table.replace(rows, ids))
        self.table.forget()


@checked
class Embedding(TableModule):
    """Embedding like torch.nn.Embedding, with its rows in a table on the servers.

        users = psfleet.torch.Embedding(None, 16, name="users")  # ids are any int64
        rows = users(torch.tensor([7, 2**40]))                   # float32 [2, 16]

    Args:
        num_embeddings: Number of rows, with ids from 0. None allows any int64, and the first update of an
            id creates its row.
        embedding_dim: Width of a row, 1 to 1024.
        padding_idx: Id whose row is zero and gets no gradient.
        name: Name of the table in the fleet. None means the module's name in the model.
        initializer: Initial values, from psfleet.initializer. Uniform in [-0.01, 0.01) by default.
        seed: Seed of the initial values, if the initializer has no seed.
        optimizer: psfleet optimizer for these rows. None means that a torch optimizer updates them, which
            must get `weight`.
        entry: Rule that decides which new ids get a row, such as psfleet.CountFilterEntry. Only if
            `num_embeddings` is None.
        precision: Number format in which the servers store rows: "float32", "bfloat16" for the weights, or
            "bfloat16/bfloat16" or "bfloat16/int8" for weights and optimizer state. docs/tables.md compares
            them.
        servers: Number of servers that hold the table, or None for all. A small table on few servers saves
            calls in each step. A table that exists already does not move.
        device: Memory that stores the rows: "cpu", "cuda" or "disk". None means the servers' setting. In a
            script without a cluster, rows of a table with "cuda" go to a model on that GPU, and gradients
            back, without a copy in host memory (docs/gpu.md).
    """

    def _plain(self, weight: nn.Parameter) -> nn.Module:
        rows, dim = weight.shape
        plain = nn.Embedding(rows, dim, self.padding_idx, sparse=True, _weight=weight.data)
        plain.weight = weight
        return plain

    @untraced
    @checked
    def forward(
        self, input: Tensor, shows: Tensor | None = None, clicks: Tensor | None = None
    ) -> Tensor:
        """Look up the rows of the ids, float32 [*input.shape, embedding_dim].

        Args:
            input: int64 ids of any shape.
            shows: With a ShowClickEntry, the number of times each id was shown: in the shape of `input`, or
                [n] or [n, 1] with one number for each sample. None means once. The push sends the numbers
                with the gradient.
            clicks: With a ShowClickEntry, the number of times each id was clicked, in the same shapes. None
                means never.
        """
        return self._look_up(input, shows, clicks)


@checked
class EmbeddingBag(TableModule):
    """Pooled embedding like torch.nn.EmbeddingBag, with its rows in a table on the servers.

        tags = psfleet.torch.EmbeddingBag(None, 16, mode="sum", name="tags")
        rows = tags(torch.tensor([[7, 2**40], [3, 7]]))  # float32 [2, 16], one row for each bag

    Args:
        num_embeddings, embedding_dim, name, initializer, seed, optimizer, entry, precision, servers,
            device: As in Embedding.
        mode: Pooling of a bag's rows: "sum", "mean" or "max". An empty bag gives zeros.
        include_last_offset: True if the last entry of `offsets` is the number of ids and starts no bag.
        padding_idx: Id that is left out when a bag is pooled.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        mode: Mode = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        name: str | None = None,
        initializer: InitializerSpec | Initializer | None = None,
        seed: int = 0,
        optimizer: Optimizer | None = None,
        entry: Entry | None = None,
        precision: RowPrecision = "float32",
        servers: int | None = None,
        device: Device | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            name=name,
            initializer=initializer,
            seed=seed,
            optimizer=optimizer,
            entry=entry,
            precision=precision,
            servers=servers,
            device=device,
        )
        if mode not in ("sum", "mean", "max"):
            raise ConfigError(f"EmbeddingBag mode is {mode!r}; it must be sum, mean or max")
        self.mode: Mode = mode
        self.include_last_offset = include_last_offset

    def _plain(self, weight: nn.Parameter) -> nn.Module:
        rows, dim = weight.shape
        plain = nn.EmbeddingBag(
            rows,
            dim,
            mode=self.mode,
            sparse=True,
            _weight=weight.data,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )
        plain.weight = weight
        return plain

    @untraced
    @checked
    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        shows: Tensor | None = None,
        clicks: Tensor | None = None,
    ) -> Tensor:
        """Look up the rows of each bag's ids and pool them to one row, float32 [bags, embedding_dim].

        Args:
            input: int64 ids: [bags, n], or [n] with `offsets`.
            offsets: Index in a flat `input` at which each bag starts.
            per_sample_weights: Factor for each id, float32 in the shape of `input`. Only with mode "sum".
            shows, clicks: As in Embedding, with one value for each id or for each bag.
        """
        has_scores = shows is not None or clicks is not None
        ends = self._ends(offsets, input.numel()) if has_scores and offsets is not None else None
        rows = self._look_up(input, shows, clicks, ends).reshape(-1, self.embedding_dim)
        # torch's embedding_bag gets the pulled rows as its weight, so an id is replaced by the position of
        # its row.
        positions = torch.arange(input.numel(), device=input.device).reshape(input.shape)
        positions, padding = self._without_padding(input, positions)
        return F.embedding_bag(
            positions,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def extra_repr(self) -> str:
        """Return the arguments to show in print(model)."""
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def _ends(self, offsets: Tensor, count: int) -> Tensor:
        """Return the start of each bag and, as last entry, the end of the last bag."""
        return offsets if self.include_last_offset else F.pad(offsets, (0, 1), value=count)

    def _without_padding(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, int | None]:
        """Give all padding ids the position of the first padding id, so that torch can leave them out.

        Args:
            positions: Position of each id's row among the pulled rows.

        Returns:
            A pair: the changed positions, and the position of the padding ids or None if there are none.
        """
        if self.padding_idx is None:
            return positions, None
        mask = ids == self.padding_idx
        if not bool(mask.any()):
            return positions, None
        first = int(positions[mask][0])
        return positions.masked_fill(mask, first), first


def _check(rows: Any, dim: Any, optimizer: Any) -> None:
    """Refuse a number or width of rows that no table can have, and an optimizer that cannot update rows."""
    whole = isinstance(rows, int | np.integer) and rows > 0
    if rows is not None and not whole:
        raise ConfigError(f"num_embeddings is {rows!r}; it must be above 0, or None for any id")
    if not isinstance(dim, int | np.integer) or not 1 <= dim <= MAX_DIM:
        raise ConfigError(f"embedding_dim is {dim!r}; it must be 1 to {MAX_DIM}")
    if optimizer is not None:
        check_outside("an embedding", optimizer)


def _padding(padding: int | None, count: int | None) -> int | None:
    if padding is None or count is None:
        return padding
    if not -count <= padding < count:
        raise ConfigError(f"padding_idx is {padding}; it must be in [{-count}, {count})")
    return padding % count
