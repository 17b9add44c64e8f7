"""convert(): moves the weights of a plain torch model, and the state of its optimizers, to the servers.

    model, opt = psfleet.torch.convert(model, torch.optim.Adam(model.parameters()))

Everything is checked before anything changes, so an error leaves model and optimizers as they were. The
second half of the file serves predictions: `module_predictor` makes a copy of a model that computes with the
weights of a runtime's tables.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from psfleet.core.base.errors import CheckpointError, ConfigError, PsfleetError, UsageError
from psfleet.core.base.validation.annotations import checked
from psfleet.core.engine.gradient_checks import as_ids
from psfleet.core.engine.kernels.bags import RowBags
from psfleet.core.engine.runtime_interface import Read, Runtime
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.core.graph.parameters.parameter_client import ParameterClient
from psfleet.serving.prediction import MakePredictor
from psfleet.torch.embeddings import Embedding, EmbeddingBag, TableModule
from psfleet.torch.optimizers import DistributedOptimizer
from psfleet.torch.parameter_plan import Optimizers, listed
from psfleet.torch.table_weight import TableWeight

M = TypeVar("M", bound=nn.Module)
Floats = NDArray[np.float32]
Kind = TypeVar("Kind", bound=DistributedOptimizer)

_MOST_SHAPES = 64  # maximum number of batch shapes for which a predictor keeps prepared bags


@checked
def convert(
    model: M,
    optimizers: Optimizers,
    *,
    name: str = "",
    runtime: Runtime | None = None,
    servers: Mapping[str, int] | None = None,
) -> tuple[M, DistributedOptimizer]:
    """Move a model's weights and its optimizers' state to the servers, and return both ready for training.

        model, opt = psfleet.torch.convert(model, torch.optim.Adam(model.parameters()))
        loss_fn(model(x), y).backward()
        opt.step()

    Training goes on from the present weights and state:

    - The weight of an `nn.Embedding(sparse=True)` or `nn.EmbeddingBag(sparse=True)` that an optimizer
      trains moves to a sparse table. On the device "meta" it has no values, and its rows start with values
      from the standard normal distribution, as torch's do.
    - Every other parameter that an optimizer trains moves to a dense table.
    - Parameters that no optimizer trains, and buffers, stay in the model.

    Args:
        model: Model to convert, changed in place.
        optimizers: One torch optimizer, or several for disjoint parameters. State from earlier steps or from
            loading moves to the servers too.
        name, runtime: As in DistributedOptimizer.
        servers: Number of servers that hold an embedding's table, by the embedding's name in the model. The
            tables of all other embeddings are on all servers.

    Returns:
        The model and the optimizer to use from now on.

    Raises:
        ConfigError: An optimizer, a module or one of their options has no exact counterpart.
        UsageError: The optimizers do not fit the model. After either error, model and optimizers are
            unchanged.
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
    """Convert as convert() does, and return an optimizer of the given class."""
    listed_optimizers = listed(optimizers)
    trainable = {
        id(p) for o in listed_optimizers for group in o.param_groups for p in group["params"]
    }
    _check_all_in(model, listed_optimizers)
    modules = {
        path: module
        for path, module in model.named_modules()
        if _is_table(module) and module.weight.requires_grad and id(module.weight) in trainable
    }
    _check_named(servers or {}, modules)
    swap = _ModuleExchange(model, listed_optimizers, _counterparts(model, modules, servers))
    swap.there()
    try:
        root = swap.root()
        return cast(M, root), kind(root, listed_optimizers, name=name, runtime=runtime)
    except PsfleetError:
        swap.back()
        raise


def with_tables(model: nn.Module, tables: Collection[str]) -> nn.Module:
    """Return the model with each sparse embedding that is named in `tables` moved to a table, as `convert`
    does.
    """
    modules = {
        path: module
        for path, module in model.named_modules()
        if _is_table(module) and (path or "embedding") in tables
    }
    swap = _ModuleExchange(model, [], _counterparts(model, modules))
    swap.there()
    return swap.root()


class _ModuleExchange:
    """Replacement of torch's embeddings by psfleet's, in the model and in the optimizers' parameter groups.

    It can be undone.
    """

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
        """Put psfleet's embeddings into the model and their weights into the optimizers' groups."""
        self._exchange(1)

    def back(self) -> None:
        """Undo `there`: put torch's embeddings and weights back."""
        self._exchange(0)

    def root(self) -> nn.Module:
        """Return the model after the exchange. It is a new module if the model itself is an embedding."""
        pair = self._pairs.get(id(self._model))
        return pair[1] if pair else self._model

    def _exchange(self, side: int) -> None:
        for parent, key, child in self._places:
            parent._modules[key] = self._pairs[child][side]
        for params, i, pair in self._entries:
            params[i] = pair[side].weight
        # Torch keys an optimizer's state by the parameter object, so the state must move to the new weight.
        for optimizer in self._optimizers:
            for pair in self._pairs.values():
                before, after = (cast(Tensor, pair[i].weight) for i in (1 - side, side))
                if before in optimizer.state:
                    optimizer.state[after] = optimizer.state.pop(before)


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


def _counterparts(
    model: nn.Module, modules: dict[str, nn.Module], servers: Mapping[str, int] | None = None
) -> dict[int, tuple[nn.Module, TableModule]]:
    """Pair each torch embedding with its replacement. Embeddings that share a weight get replacements that
    share a table.
    """
    counts = {id(modules[path].weight): count for path, count in (servers or {}).items()}
    pairs: dict[int, tuple[nn.Module, TableModule]] = {}
    first: dict[int, TableModule] = {}
    for path, module in modules.items():
        _check_tied(model, path, module, modules)
        twin = _counterpart(path or "embedding", module, counts.get(id(module.weight)))
        twin.share(first.setdefault(id(module.weight), twin))
        pairs[id(module)] = module, twin
    return pairs


def _check_named(servers: Mapping[str, int], modules: Mapping[str, nn.Module]) -> None:
    """Raise an error if `servers` has a name that is not the name of an embedding that becomes a table."""
    for path in servers:
        if path not in modules:
            raise ConfigError(
                f"servers has {path!r}; the embeddings that become tables are "
                f"{', '.join(map(repr, modules)) or 'none'}"
            )


def _check_tied(
    model: nn.Module, path: str, module: nn.Module, modules: dict[str, nn.Module]
) -> None:
    """Refuse an embedding with sparse gradients whose weight is also used by a module that is no
    embedding.
    """
    for other_path, user in model.named_modules():
        is_user = any(p is module.weight for p in user._parameters.values())
        if is_user and other_path not in modules:
            raise ConfigError(
                f"the weight of {path!r} is tied to {other_path!r}, whose gradients "
                f"({type(user).__name__}) are dense, so each step needs all rows; build {path!r} with "
                "sparse=False"
            )


def _counterpart(path: str, module: Any, servers: int | None) -> TableModule:
    """Return the psfleet module that replaces a torch embedding. Its table will be on `servers` servers."""
    if type(module) not in (nn.Embedding, nn.EmbeddingBag):
        raise ConfigError(
            f"{path!r} is a {type(module).__name__}, a class of your own; convert() knows "
            "torch.nn.Embedding and torch.nn.EmbeddingBag only"
        )
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option) is not None and getattr(module, option) is not False:
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
    twin = (
        _bag(module, servers)
        if isinstance(module, nn.EmbeddingBag)
        else Embedding(
            module.num_embeddings, module.embedding_dim, module.padding_idx, servers=servers
        )
    )
    if module.weight.is_meta:
        twin.table.initializer = InitializerSpec("normal", 0.0, 1.0)
    else:
        twin.table.content = module.weight.detach().cpu().contiguous().numpy()
    return twin.train(module.training)


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
    model_parameters = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in model_parameters:
                    raise UsageError(
                        f"torch.optim.{type(optimizer).__name__} has a parameter of shape "
                        f"{tuple(parameter.shape)} that is not in the model"
                    )


def module_predictor(model: nn.Module) -> MakePredictor:
    """Return a function that makes a predictor from a runtime: a copy of the model with that runtime's
    weights.

    The predictor finds its tables by the names of parameters and embeddings in the model, the names that
    `DistributedOptimizer` gives them. Buffers, and frozen parameters without a table, keep the model's
    values.
    """
    unbound = _unbound(model)
    return lambda runtime: ModulePredictor(unbound, runtime)


class ModulePredictor:
    """Callable copy of a model that computes predictions with the weights of a runtime's tables.

    Args:
        model: Model whose parameters and embeddings have the names of the tables.
        direct: True to call submodules without torch's search for hooks, which is faster. Use False for a
            model that is to be traced.

    Attributes:
        module: The copy, in evaluation mode.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, *, direct: bool = True) -> None:
        self._runtime = runtime
        self.module = _bound(model, runtime, direct=direct).eval()

    def __call__(self, inputs: Any) -> Any:
        with torch.inference_mode():
            return self.module(*inputs) if isinstance(inputs, tuple) else self.module(inputs)

    def refresh(self) -> None:
        """Copy the present values of the dense tables into the copy of the model."""
        specs = {spec.name: spec for spec in self._runtime.specs().values()}
        _fill(self.module, self._runtime, specs)


def _unbound(model: nn.Module) -> nn.Module:
    """Copy the model, with embeddings that are not connected to a table."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, TableModule) and module.table.bound:
            memo[id(module)] = _unbound_table(module, memo)
    return copy.deepcopy(model, memo)


def _unbound_table(module: TableModule, memo: dict[int, Any]) -> TableModule:
    rows = memo.get(id(module.table))
    if rows is None:
        rows = memo[id(module.table)] = copy.deepcopy(module.table, memo)
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update({**module.__dict__, "table": rows, "_parameters": {"weight": rows.weight}})
    return twin


def _bound(model: nn.Module, runtime: Runtime, *, direct: bool) -> nn.Module:
    """Return a copy of the model whose parameters and embeddings have the values of the runtime's tables."""
    specs = {spec.name: spec for spec in runtime.specs().values()}
    model, client = with_tables(model, specs), ParameterClient(runtime)
    for path, module in model.named_modules():
        if isinstance(module, TableModule) and not module.table.bound:
            name = module.table.name or path or "embedding"
            module.table.read_from(client, _spec(specs, name, "sparse", (module.table.dim,)))
    _fill(model, runtime, specs)
    for module in model.modules():
        lean = _lean(module, runtime) if isinstance(module, Embedding | EmbeddingBag) else None
        if direct:
            _call_directly(module, lean)
        elif lean is not None:
            module.forward = lean
    return model


def _call_directly(module: nn.Module, function: Callable[..., Any] | None = None) -> None:
    """Make a module skip torch's search for hooks when it is called.

    A call then runs `function`, or the module's `forward` if `function` is None. Parameters and submodules
    become plain attributes, because torch's `__getattr__` takes longer than a small layer.
    """
    kind, attributes = type(module), module.__dict__
    hooks = "forward", "_forward_hooks", "_forward_pre_hooks", "_compiled_call_impl"
    is_plain = kind.__call__ is nn.Module.__call__ and not isinstance(
        module, torch.jit.ScriptModule
    )
    if is_plain and not any(attributes.get(name) for name in hooks):
        attributes.update({**module._parameters, **module._modules})
        call = kind.forward if function is None else staticmethod(function)
        members = {"__call__": call, "__module__": kind.__module__}
        module.__class__ = type(kind.__name__, (kind,), members)


def _lean(module: Embedding | EmbeddingBag, runtime: Runtime) -> Callable[..., Tensor]:
    """Return a forward function for predictions, which leaves out what only training needs."""
    key, count, dim = module.table.key, module.num_embeddings, module.embedding_dim
    owner, padding = f"embedding {module.table.name!r}", module.padding_idx
    mean = isinstance(module, EmbeddingBag) and module.mode == "mean"
    bags: dict[tuple[int, ...], RowBags] = {}  # by the shape of the pulled rows

    def pulled(ids: Tensor) -> Floats:
        numbers = as_ids(ids.numpy() if ids.is_cpu else ids.numpy(force=True), owner)
        # As uint64, a negative id is larger than any count, so one maximum checks both bounds. If it fails,
        # `_check` finds the bad id and raises.
        if (
            count is not None
            and np.maximum.reduce(numbers.view(np.uint64), None, initial=0) >= count
        ):
            module.table._check(numbers)
        rows: Floats = runtime.pull([Read(key, numbers)])[0]
        return rows

    def look_up(ids: Tensor, *scores: Any) -> Tensor:
        rows = torch.from_numpy(pulled(ids))
        return rows if ids.is_cpu else rows.to(ids.device)

    def pool(
        ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None, *scores: Any
    ) -> Tensor:
        assert isinstance(module, EmbeddingBag)
        # Usually `ids` is a [samples, ids] tensor without offsets or weights, and psfleet's pooling kernel
        # pools it. Other calls take torch's embedding_bag, with the pulled rows as its weight and their
        # positions as ids.
        plain = offsets is None and weights is None and padding is None and ids.is_cpu
        if plain and ids.ndim == 2 and module.mode != "max":
            rows = pulled(ids)
            row_bags = bags.get(rows.shape)
            if row_bags is None:
                row_bags = bags[rows.shape] = RowBags(np.full(*rows.shape[:2]), mean=mean)
                if len(bags) > _MOST_SHAPES:
                    del bags[next(iter(bags))]
            return torch.from_numpy(row_bags.pool(rows.reshape(-1, dim)))
        positions = torch.arange(ids.numel(), device=ids.device).reshape(ids.shape)
        row_positions, first = module._without_padding(ids, positions)
        return functional.embedding_bag(
            row_positions,
            look_up(ids).reshape(-1, dim),
            offsets,
            mode=module.mode,
            per_sample_weights=weights,
            include_last_offset=module.include_last_offset,
            padding_idx=first,
        )

    return pool if isinstance(module, EmbeddingBag) else look_up


def _fill(model: nn.Module, runtime: Runtime, specs: dict[str, TableSpec]) -> None:
    """Copy the values of dense tables into the model's parameters."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, TableWeight) or (
            name not in specs and not parameter.requires_grad
        ):
            continue
        spec = _spec(specs, name, "dense", tuple(parameter.shape))
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(runtime.pull([Read(spec.key)])[0]))


def _spec(specs: dict[str, TableSpec], name: str, kind: str, shape: tuple[int, ...]) -> TableSpec:
    spec = specs.get(name)
    if spec is None:
        raise CheckpointError(
            f"the checkpoint has no table {name!r} of the model; it has {', '.join(specs) or 'none'}"
        )
    if (spec.kind, spec.shape) != (kind, shape):
        raise CheckpointError(
            f"table {name!r} of the checkpoint is {spec.kind} of shape {spec.shape}, and the model's is "
            f"{kind} of shape {shape}"
        )
    return spec
