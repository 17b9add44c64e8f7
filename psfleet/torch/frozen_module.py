"""A torch module that predicts with the values of a snapshot, beside the one that is trained."""

import copy
from typing import Any

import torch
from torch import nn

from psfleet.errors import CheckpointError
from psfleet.parameters.parameter_client import ParameterClient
from psfleet.prediction.predictors import MakePredictor, Predictor
from psfleet.runtime.interface import Read, Runtime
from psfleet.schema.table import TableSpec
from psfleet.torch.conversion import with_tables
from psfleet.torch.embeddings import TableModule
from psfleet.torch.table_weight import TableWeight

__all__ = ["module_predictor"]


def module_predictor(model: nn.Module) -> MakePredictor:
    """What predicts as the model does, with the values of the tables of a runtime.

    Parameters and embeddings have the tables that `DistributedOptimizer` gives them: those of their names in
    the model. Buffers, and parameters without gradients that have no table, stay as they are in the model.
    """
    copied = _unbound(model)

    def make(runtime: Runtime) -> Predictor:
        module = _bound(copied, runtime).eval()

        def predict(inputs: Any) -> Any:
            with torch.no_grad():
                return module(*inputs) if isinstance(inputs, tuple) else module(inputs)

        return predict

    return make


def _unbound(model: nn.Module) -> nn.Module:
    """A copy whose embeddings have no table."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, TableModule) and module.table.bound:
            memo[id(module)] = _unbound_table(module, memo)
    return copy.deepcopy(model, memo)


def _unbound_table(module: TableModule, memo: dict[int, Any]) -> TableModule:
    rows = memo.get(id(module.table))
    if rows is None:
        rows = memo[id(module.table)] = copy.deepcopy(module.table, memo)
    made = module.__class__.__new__(module.__class__)
    made.__dict__.update({**module.__dict__, "table": rows, "_parameters": {"weight": rows.weight}})
    return made


def _bound(model: nn.Module, runtime: Runtime) -> nn.Module:
    """The model with the values of the runtime's tables."""
    specs = {spec.name: spec for spec in runtime.specs().values()}
    model, client = with_tables(model, specs), ParameterClient(runtime)
    for path, module in model.named_modules():
        if isinstance(module, TableModule) and not module.table.bound:
            name = module.table.name or path or "embedding"
            module.table.read_from(client, _spec(specs, name, "sparse", (module.table.dim,)))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, TableWeight) or (
            name not in specs and not parameter.requires_grad
        ):
            continue
        spec = _spec(specs, name, "dense", tuple(parameter.shape))
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(runtime.pull([Read(spec.key)])[0]))
    return model


def _spec(specs: dict[str, TableSpec], name: str, kind: str, shape: tuple[int, ...]) -> TableSpec:
    found = specs.get(name)
    if found is None:
        raise CheckpointError(
            f"the checkpoint has no table {name!r} of the model; it has {', '.join(specs) or 'none'}"
        )
    if (found.kind, found.shape) != (kind, shape):
        raise CheckpointError(
            f"table {name!r} of the checkpoint is {found.kind} of shape {found.shape}, and the model's is "
            f"{kind} of shape {shape}"
        )
    return found
