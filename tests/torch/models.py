"""Plain torch models of three shapes, their data and a plain training loop.

All rows are WIDTH wide, for kernels are compiled for each width and rule.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from psfleet import fleet as fleet_api

torch.set_num_threads(1)
# torch's own Adagrad warns without a choice.
torch.sparse.check_sparse_tensor_invariants.disable()

ROWS, FIELDS, BATCH, WIDTH = 60, 5, 16, 5
Batch = dict[str, Tensor]


class DeepFM(nn.Module):
    """Two embeddings over the same ids, a factorization machine and an MLP beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.deep = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(FIELDS * WIDTH + 3, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Batch) -> Tensor:
        factors = self.deep(batch["ids"])
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        hidden = torch.cat([factors.flatten(1), batch["numbers"]], 1)
        logit = self.wide(batch["ids"]).sum((1, 2)) + 0.1 * pairs + self.mlp(hidden)[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logit, batch["label"])


class Bags(nn.Module):
    """Two bags with offsets, one of them weighted, and a normalized head with a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(ROWS, WIDTH, mode="mean", sparse=True, padding_idx=0)
        self.sum = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True, include_last_offset=True)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, 1)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, batch: Batch) -> Tensor:
        ids = batch["ids"].reshape(-1)
        offsets = batch["offsets"]
        weighted = self.sum(ids, offsets, batch["weights"])
        hidden = torch.cat([self.mean(ids, offsets[:-1]), weighted], 1)
        logit = self.scale * self.head(self.norm(hidden))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logit, batch["label"])


class Sequence(nn.Module):
    """A padded sequence through a GRU, and an item whose embedding is compared with its end."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict(
            {
                "user": nn.Embedding(ROWS, WIDTH, padding_idx=0, sparse=True),
                "item": nn.Embedding(ROWS, WIDTH, sparse=True),
            }
        )
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, batch: Batch) -> Tensor:
        _, end = self.gru(self.towers["user"](batch["ids"]))
        logit = (end[0] * self.towers["item"](batch["ids"][:, 2])).sum(1)
        return nn.functional.mse_loss(logit, batch["label"])


MODELS: dict[str, Callable[[], nn.Module]] = {"deepfm": DeepFM, "bags": Bags, "sequence": Sequence}


def tables_of(model: nn.Module) -> list[nn.Parameter]:
    """The weights whose gradients are sparse."""
    return [m.get_parameter("weight") for m in model.modules() if getattr(m, "sparse", False)]


def dense_of(model: nn.Module) -> list[nn.Parameter]:
    """Every other parameter."""
    sparse = {id(p) for p in tables_of(model)}
    return [p for p in model.parameters() if id(p) not in sparse]


def _sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), 0.1)]


def _momentum(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(tables_of(model), 0.01, momentum=0.7),
        torch.optim.SGD(dense_of(model), 0.01, momentum=0.9, nesterov=True, weight_decay=1e-3),
    ]


def _adagrad(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adagrad(model.parameters(), 0.05, initial_accumulator_value=0.1)]


def _adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SparseAdam(tables_of(model), 0.01),
        torch.optim.Adam(dense_of(model), 0.003, weight_decay=1e-3),
    ]


def _adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SparseAdam(tables_of(model), 0.01, betas=(0.8, 0.99), eps=1e-4),
        torch.optim.AdamW(dense_of(model), 0.003, weight_decay=0.1),
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "adam": _adam,
    "adamw": _adamw,
}


def batches(steps: int, seed: int = 1) -> Iterator[Batch]:
    """Random ids, some of them 0, in bags of unequal length of which some are empty."""
    dice = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, ROWS, (BATCH, FIELDS), generator=dice)
        ids[torch.rand(ids.shape, generator=dice) < 0.1] = 0
        cuts = torch.randint(0, ids.numel() + 1, (BATCH - 1,), generator=dice).sort().values
        ends = torch.tensor([ids.numel()])
        yield {
            "ids": ids,
            "offsets": torch.cat([torch.tensor([0]), cuts, ends]),
            "numbers": torch.randn(BATCH, 3, generator=dice),
            "weights": torch.rand(ids.numel(), generator=dice),
            "label": (ids[:, 0] % 2).float(),
        }


def curve(
    model: Callable[[Any], Tensor],
    optimizers: Iterable[Any],
    data: Iterable[Any],
    change: Callable[[], object] = lambda: None,
    set_to_none: bool = True,
) -> list[float]:
    """The loss of each step of plain training.

    Args:
        change: Called before each update; it may change the gradients.
        set_to_none: What gradients become when they are cleared; False: zeros.
    """
    optimizers, losses = list(optimizers), []
    for batch in data:
        loss = model(batch)
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        change()
        for optimizer in optimizers:
            optimizer.step()
    return losses


def net() -> Any:
    """A dense model."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def dense_batches(steps: int, seed: int) -> list[Tensor]:
    """Batches for `net`."""
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(16, 4, generator=dice) for _ in range(steps)]


def dense_curve(model: nn.Module, optimizers: Iterable[Any], data: Iterable[Tensor]) -> list[float]:
    """The losses of `net`."""
    return curve(lambda x: (model(x)[:, 0] - x.sum(1).sin()).square().mean(), optimizers, data)


def under(**parts: Any) -> None:
    """Have this process train under a strategy with these parts, until the test ends."""
    configs = {f"{part}_configs": said for part, said in parts.items()}
    on = dict.fromkeys(parts, True)
    fleet_api.init(strategy=fleet_api.DistributedStrategy(**configs, **on))
