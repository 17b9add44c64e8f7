"""psfleet for PyTorch: embeddings and optimizers whose weights and state are on the servers.

    import psfleet.torch as pst
    model, opt = pst.convert(model, (torch.optim.SparseAdam(tables), torch.optim.Adam(mlp)))
    for x, y in pst.prefetch(loader):
        loss_fn(model(x), y).backward()
        opt.step()
        opt.clear_grad()

`import psfleet.torch` does not import torch. The first use of one of the names above does.
"""

import importlib
from typing import TYPE_CHECKING, Any

from psfleet.core.base.errors import optional_module

if TYPE_CHECKING:
    from psfleet.torch.conversion import convert
    from psfleet.torch.embeddings import Embedding, EmbeddingBag
    from psfleet.torch.feature_embedding import FeatureEmbedding
    from psfleet.torch.loader_prefetch import prefetch
    from psfleet.torch.optimizers import DistributedOptimizer
    from psfleet.torch.sequential_pipeline import Pipeline

__all__ = [
    "DistributedOptimizer",
    "Embedding",
    "EmbeddingBag",
    "FeatureEmbedding",
    "Pipeline",
    "convert",
    "prefetch",
]

_HOMES = {
    "DistributedOptimizer": "psfleet.torch.optimizers",
    "Embedding": "psfleet.torch.embeddings",
    "EmbeddingBag": "psfleet.torch.embeddings",
    "FeatureEmbedding": "psfleet.torch.feature_embedding",
    "Pipeline": "psfleet.torch.sequential_pipeline",
    "convert": "psfleet.torch.conversion",
    "prefetch": "psfleet.torch.loader_prefetch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'psfleet.torch' has no attribute {name!r}")
    optional_module("torch", f"psfleet.torch.{name} needs", "PyTorch", "torch")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
