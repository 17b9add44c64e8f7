"""FeatureEmbedding, a torch module that looks up all features of a FeatureSet with one call to each server.

For a model with many features it replaces one `Embedding` for each feature. A custom autograd function
connects the pooled values to the weights of the tables, so that `backward()` gives one sparse gradient for
each table.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import checked
from psfleet.data.feature_sets.feature_lookup import FeatureLookup
from psfleet.data.feature_sets.feature_set import Feature, FeatureSet, Table
from psfleet.torch.embedding_rows import EmbeddingRows, pooled_of
from psfleet.torch.embeddings import TableModule
from psfleet.torch.table_weight import untraced

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class FeatureTable(TableModule):
    """Module that stands for one table of a feature set, so that torch's optimizers see its `weight`."""

    def __init__(self, table: Table) -> None:
        if "." in table.name:
            raise ConfigError(
                f"table {table.name!r} has a dot in its name, which state dicts of torch do not allow; "
                "give it another name"
            )
        super().__init__(
            None,
            table.dim,
            name=table.name,
            initializer=table.initializer,
            optimizer=table.optimizer,
            entry=table.entry,
            precision=table.precision,
            servers=table.servers,
        )


@checked
class FeatureEmbedding(nn.Module):
    """Module that looks up and pools all features of a batch. Their rows are in tables on the servers.

        embed = pst.FeatureEmbedding(features)
        values = embed({"user": users, "friends": Jagged(ids, lengths)})
        hidden = torch.cat([values["user"], values["friends"]], dim=1)

    A lookup takes one call to each server for all tables, and `step()` pushes all gradients in one call.

    Args:
        features: Features of the model. A table may have a psfleet optimizer. The rows of any other table
            are updated by the torch optimizer that gets its `weight`:
            `torch.optim.SparseAdam(embed.parameters())`.

    Attributes:
        features: Features, as passed.
        tables: Module of each table, by the table's name. Its `weight` is a parameter in place of the rows.
    """

    def __init__(self, features: FeatureSet) -> None:
        super().__init__()
        self.features = features
        self.tables = nn.ModuleDict()
        for table in features.tables.values():
            # Not through add_module, which refuses the names of a module's methods, such as "items".
            self.tables._modules[table.name] = FeatureTable(table)

    @untraced
    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the pooled value of each feature by name, in the order of the feature set.

        Args:
            batch: Ids of each feature, by its name, or a KeyedJaggedTensor of TorchRec. Ids are a
                `psfleet.features.Jagged`, a tensor [n] or [n, k], a list of lists, or a mapping with
                `values` and `lengths` or `offsets`. For a Number feature give its values. A feature that is
                missing in the batch has no ids.

        Returns:
            float32 tensors [samples, dim] on the device of the batch's first tensor. A feature with pooling
            "none" gives [n, dim] for n ids or, if it has `last`, [samples, last, dim].
        """
        names = list(self.tables)
        lookup = FeatureLookup(self.features, batch, {name: name for name in names})
        tables = [_rows(self.tables[name]) for name in names]
        lookups = [(table, lookup.pooled[name]) for table, name in zip(tables, names, strict=True)]
        bags = dict(zip(names, pooled_of(lookups, keep=self.training), strict=True))
        weights = [table.weight for table in tables]
        device = _device(batch)
        values = _PooledFeatures.apply(self, lookup, bags, device, *weights)  # type: ignore[no-untyped-call]
        return dict(zip(self.features.features, values, strict=True))


class _PooledFeatures(torch.autograd.Function):
    """Autograd function from the weights of the tables to the values of the features."""

    @staticmethod
    def forward(
        ctx: Any,
        module: FeatureEmbedding,
        lookup: FeatureLookup[str],
        bags: Mapping[str, Floats],
        device: torch.device,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.module, ctx.lookup = module, lookup
        ctx.set_materialize_grads(False)
        constant = [f for f in module.features if not isinstance(f, Feature)]
        # Copied, because the arrays may be pulled rows that are still in use, and a model may change its
        # inputs in place.
        values = lookup.values(bags)
        out = {name: torch.from_numpy(array.copy()).to(device) for name, array in values.items()}
        ctx.mark_non_differentiable(*(out[number.name] for number in constant))
        return tuple(out.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        names = ctx.module.features.features
        outputs = {
            name: grad.detach().cpu().numpy()
            for name, grad in zip(names, grads, strict=True)
            if grad is not None
        }
        gradients = ctx.lookup.pooled_gradients(outputs)
        sparse = (
            None if name not in gradients else _rows(table).bags.sparse(gradients[name])
            for name, table in ctx.module.tables.items()
        )
        return None, None, None, None, *sparse


def _rows(module: nn.Module) -> EmbeddingRows:
    assert isinstance(module, FeatureTable)
    return module.table


def _device(batch: Any) -> torch.device:
    """Return the device of the first tensor in a batch, or the CPU if there is none."""
    if isinstance(batch, Tensor):
        return batch.device
    if callable(getattr(batch, "values", None)) and callable(getattr(batch, "lengths", None)):
        return _device(batch.values())  # a JaggedTensor or KeyedJaggedTensor of TorchRec
    parts = batch.values() if isinstance(batch, Mapping) else ()
    devices = (
        part for part in parts if isinstance(part, Tensor | Mapping) or hasattr(part, "lengths")
    )
    return next((_device(part) for part in devices), torch.device("cpu"))
