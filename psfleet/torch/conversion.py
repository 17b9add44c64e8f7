"""convert(): a plain torch model and its optimizers, moved to the servers."""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from psfleet.errors import ConfigError, PsfleetError, UsageError
from psfleet.runtime.interface import Runtime
from psfleet.schema.table import InitializerSpec
from psfleet.torch.embeddings import Embedding, EmbeddingBag, TableModule
from psfleet.torch.optimizers import DistributedOptimizer
from psfleet.torch.parameter_plan import Optimizers, listed

__all__ = ["convert", "converted", "with_tables"]

M = TypeVar("M", bound=nn.Module)
Kind = TypeVar("Kind", bound=DistributedOptimizer)


def convert(
    model: M,
    optimizers: Optimizers,
    *,
    name: str = "",
    runtime: Runtime | None = None,
    servers: Mapping[str, int] | None = None,
) -> tuple[M, DistributedOptimizer]:
    """Move a model and its optimizers to the servers, with the weights it has now.

    Every `nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)` that an optimizer trains
    becomes a table of rows; every other parameter that an optimizer trains becomes a dense table.
    What no optimizer trains stays as it is. A weight on the device "meta" has no values to move:
    its rows start from the standard normal distribution, as torch's, when they are first updated.

    Args:
        model: Is changed in place.
        optimizers: One torch optimizer or several, for disjoint parameters. State that they have, of
            steps taken or loaded, goes to the servers too.
        name, runtime: As for DistributedOptimizer.
        servers: By the name of an embedding in the model how many servers hold its table, as for Embedding.

    Returns:
        The model and the optimizer to use from now on.

    Raises:
        ConfigError: An optimizer, a module or an option of them has no exact counterpart.
        UsageError: The optimizers do not fit the model. Either way nothing was changed.
    """
    return converted(
        model, optimizers, DistributedOptimizer, name=name, runtime=runtime, servers=servers
    )


def converted(
    model: M,
    optimizers: Optimizers,
    kind: type[Kind],
    *,
    name: str,
    runtime: Runtime | None,
    servers: Mapping[str, int] | None = None,
) -> tuple[M, Kind]:
    """As convert(), with an optimizer of this kind."""
    given = listed(optimizers)
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is {model!r}; it must be a torch.nn.Module")
    trained = {id(p) for o in given for group in o.param_groups for p in group["params"]}
    _check_all_in(model, given)
    modules = {
        path: module
        for path, module in model.named_modules()
        if _is_table(module) and module.weight.requires_grad and id(module.weight) in trained
    }
    _check_named(servers or {}, modules)
    swap = _ModuleExchange(model, given, _counterparts(model, modules, servers))
    swap.there()
    try:
        root = swap.root()
        return cast(M, root), kind(root, given, name=name, runtime=runtime)
    except PsfleetError:
        swap.back()
        raise


def with_tables(model: nn.Module, tables: Collection[str]) -> nn.Module:
    """The model with its sparse embeddings of these names on tables, as `convert` would put them there."""
    modules = {
        path: module
        for path, module in model.named_modules()
        if _is_table(module) and (path or "embedding") in tables
    }
    swap = _ModuleExchange(model, [], _counterparts(model, modules))
    swap.there()
    return swap.root()


class _ModuleExchange:
    """Exchanges modules in the model, and their weights in the optimizers' groups; can undo it."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        pairs: dict[int, tuple[nn.Module, TableModule]],
    ) -> None:
        self._model = model
        self._pairs = pairs
        self._places = [
            (parent, key, id(child))
            for parent in model.modules()
            for key, child in parent._modules.items()
            if id(child) in pairs
        ]
        weights = {id(old.weight): pair for pair in pairs.values() for old in pair[:1]}
        self._optimizers = optimizers
        self._entries = [
            (group["params"], i, weights[id(p)])
            for o in optimizers
            for group in o.param_groups
            for i, p in enumerate(group["params"])
            if id(p) in weights
        ]

    def there(self) -> None:
        """Put the tables in."""
        self._exchange(1)

    def back(self) -> None:
        """Put torch's own modules back."""
        self._exchange(0)

    def root(self) -> nn.Module:
        """The model, which may itself be an embedding."""
        pair = self._pairs.get(id(self._model))
        return pair[1] if pair else self._model

    def _exchange(self, which: int) -> None:
        for parent, key, child in self._places:
            parent._modules[key] = self._pairs[child][which]
        for params, i, pair in self._entries:
            params[i] = pair[which].weight
        for optimizer in self._optimizers:
            for pair in self._pairs.values():
                before, after = (cast(Tensor, pair[i].weight) for i in (1 - which, which))
                if before in optimizer.state:
                    optimizer.state[after] = optimizer.state.pop(before)


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


def _counterparts(
    model: nn.Module, modules: dict[str, nn.Module], servers: Mapping[str, int] | None = None
) -> dict[int, tuple[nn.Module, TableModule]]:
    """Each module with the one on the servers; those that share a weight share a table."""
    wanted = {id(modules[path].weight): count for path, count in (servers or {}).items()}
    pairs: dict[int, tuple[nn.Module, TableModule]] = {}
    first: dict[int, TableModule] = {}
    for path, module in modules.items():
        _check_tied(model, path, module, modules)
        made = _counterpart(path or "embedding", module, wanted.get(id(module.weight)))
        made.share(first.setdefault(id(module.weight), made))
        pairs[id(module)] = module, made
    return pairs


def _check_named(servers: Mapping[str, int], modules: Mapping[str, nn.Module]) -> None:
    """Refuse to place what becomes no table."""
    for path in servers:
        if path not in modules:
            raise ConfigError(
                f"servers has {path!r}; the embeddings that become tables are "
                f"{', '.join(map(repr, modules)) or 'none'}"
            )


def _check_tied(
    model: nn.Module, path: str, module: nn.Module, modules: dict[str, nn.Module]
) -> None:
    """Refuse a weight that is used by more than embeddings with sparse gradients."""
    for other, user in model.named_modules():
        used = any(p is module.weight for p in user._parameters.values())
        if used and other not in modules:
            raise ConfigError(
                f"the weight of {path!r} is tied to {other!r}, whose gradients "
                f"({type(user).__name__}) are dense, so each step needs all rows; build {path!r} with "
                "sparse=False"
            )


def _counterpart(path: str, module: Any, servers: int | None) -> TableModule:
    """The module on the servers, as many as that, that does what a torch embedding does."""
    if type(module) not in (nn.Embedding, nn.EmbeddingBag):
        raise ConfigError(
            f"{path!r} is a {type(module).__name__}, a class of your own; convert() knows "
            "torch.nn.Embedding and torch.nn.EmbeddingBag only"
        )
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option):
            raise ConfigError(
                f"{path!r} has {option}={getattr(module, option)!r}, which rows on servers "
                "cannot follow; build it without"
            )
    if module.weight.dtype != torch.float32:
        raise UsageError(
            f"{path!r} has a weight of {module.weight.dtype}, and servers hold torch.float32; convert "
            "model.float(), and compute in 16 bits with torch.autocast"
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ConfigError(
            f"{path!r} has hooks, which conversion would lose; register them on the converted model"
        )
    made = (
        _bag(module, servers)
        if isinstance(module, nn.EmbeddingBag)
        else Embedding(
            module.num_embeddings, module.embedding_dim, module.padding_idx, servers=servers
        )
    )
    if module.weight.is_meta:
        made.table.initializer = InitializerSpec("normal", 0.0, 1.0)
    else:
        made.table.content = module.weight.detach().cpu().contiguous().numpy()
    return made.train(module.training)


def _bag(module: nn.EmbeddingBag, servers: int | None) -> EmbeddingBag:
    return EmbeddingBag(
        module.num_embeddings,
        module.embedding_dim,
        cast(Any, module.mode),
        module.include_last_offset,
        module.padding_idx,
        servers=servers,
    )


def _check_all_in(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    known = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise UsageError(
                        f"torch.optim.{type(optimizer).__name__} has a parameter of shape "
                        f"{tuple(parameter.shape)} that is not in the model"
                    )
