"""Export of a PyTorch module as an ONNX graph, for `psfleet.serving.export(..., "onnx")`.

An embedding's rows do not fit into a graph, so the result of each lookup becomes an input of the graph,
named after the embedding. A program that runs the graph must look the rows up first.
psfleet.serving.onnx_files writes the file.

torch.onnx.export traces the module once with an example. A trace silently turns Python numbers that depend
on the input into constants, so `_check` then runs the graph with a second example.
"""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from psfleet.core.base.errors import ConfigError, PsfleetError
from psfleet.core.engine.runtime_interface import Runtime
from psfleet.data.feature_sets.feature_set import Feature, FeatureSet
from psfleet.serving.onnx_files import onnx_module, save_model
from psfleet.torch.conversion import ModulePredictor
from psfleet.torch.embeddings import Embedding, EmbeddingBag, TableModule
from psfleet.torch.feature_embedding import FeatureEmbedding

_OPSET = 17
_EXPORT: Callable[..., Any] = torch.onnx.export
# The tracing exporter needs only the package onnx; the newer one (dynamo) needs onnxscript too.
_NAMED = {"dynamo": False} if "dynamo" in inspect.signature(_EXPORT).parameters else {}


class _LookUps:
    """Replaces the lookups of a module, so that their results can first be recorded and then be given as
    inputs.

    In a recording run, modules look rows up as usual, and `found` gets the results. In later runs, such as
    the trace, lookups return the rows in `given`, so that the trace sees inputs in place of lookups. The
    calls of a module are numbered in their names: "item", "item.2" and so on.

    Attributes:
        tables: Table of each graph input that has rows. Inputs of a Number feature have no table.
        found: Rows that the last recording run looked up, by name of the graph input.
        given: Rows that lookups return in this run, by the same names. Empty in a recording run.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tables: dict[str, str] = {}
        self.found: dict[str, Tensor] = {}
        self.given: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        for path, module in model.named_modules():
            if isinstance(module, TableModule):  # tracing saves the state of all modules
                module._save_to_state_dict = lambda *state: None  # type: ignore[method-assign]
            if isinstance(module, Embedding | EmbeddingBag):
                table = module.table.name or path or "embedding"
                module.forward = self._rows(  # type: ignore[method-assign]
                    path or "embedding", table, module.forward
                )
            elif isinstance(module, FeatureEmbedding):
                module.forward = self._features(  # type: ignore[method-assign]
                    module.features, module.forward
                )

    def restart(self, rows: dict[str, Tensor]) -> None:
        """Begin a run in which lookups return these rows. With an empty dict, begin a recording run."""
        self.given = rows
        self._counts.clear()

    def _rows(self, path: str, table: str, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def rows(*ids: Any, **options: Any) -> Tensor:
            name = self._name(path, table)
            if not self.given:
                self.found[name] = plain(*ids, **options)
            return (self.given or self.found)[name]

        return rows

    def _features(
        self, features: FeatureSet, plain: Callable[..., dict[str, Tensor]]
    ) -> Callable[..., dict[str, Tensor]]:
        def values(batch: Any) -> dict[str, Tensor]:
            tables = {f.name: f.table.name if isinstance(f, Feature) else "" for f in features}
            names = {name: self._name(name, table) for name, table in tables.items()}
            if not self.given:
                self.found |= {names[name]: value for name, value in plain(batch).items()}
            return {name: (self.given or self.found)[at] for name, at in names.items()}

        return values

    def _name(self, name: str, table: str) -> str:
        self._counts[name] += 1
        name = name if self._counts[name] == 1 else f"{name}.{self._counts[name]}"
        if table:
            self.tables[name] = table
        return name


class _Graph(nn.Module):
    """Wrapper of a module that takes a flat list of tensors: first looked-up rows, then the module's own
    tensors.

    The tracing exporter needs a flat list. The arguments of the module may be nested, so an example of them
    is flattened to `leaves`, and each call replaces its tensors.
    """

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        super().__init__()
        self.predict = ModulePredictor(model, runtime, direct=False)
        self.model = self.predict.module
        self.look_ups = _LookUps(self.model)

    def take(self, example: Any) -> None:
        """Run the module with an example, and record the names and values of inputs and outputs."""
        self.look_ups.restart({})
        out = self.predict(example)
        self.outputs = list(out) if isinstance(out, Mapping) else ["output"]
        self.rows = dict(self.look_ups.found)
        self.leaves, self.tree = tree_flatten(example)
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        keys = list(example) if isinstance(example, Mapping) else []
        flat = len(keys) == len(self.leaves)
        self.tensors = {keys[i] if flat else f"input.{i}": self.leaves[i] for i in self.places}

    def inputs(self) -> dict[str, Tensor]:
        """Return an example value for each input of the graph: first rows, then tensors."""
        tensors = {
            name if name not in self.rows else f"ids.{name}": t for name, t in self.tensors.items()
        }
        return {name: tensor.clone() for name, tensor in {**self.rows, **tensors}.items()}

    def forward(self, *tensors: Tensor) -> Any:
        self.look_ups.restart(dict(zip(self.rows, tensors, strict=False)))
        leaves = list(self.leaves)
        for position, tensor in zip(self.places, tensors[len(self.rows) :], strict=True):
            leaves[position] = tensor
        example = tree_unflatten(leaves, self.tree)
        out = self.model(*example) if isinstance(example, tuple) else self.model(example)
        return tuple(out.values()) if isinstance(out, Mapping) else out


def write_onnx(
    where: Path,
    model: nn.Module,
    runtime: Runtime,
    features: FeatureSet | None,
    example: Any = None,
) -> None:
    """Write a module as an ONNX graph to a file, for `psfleet.serving.export`.

    Args:
        model: The module. Its features may be changed, so do not train or predict with it afterwards.
        runtime: Runtime whose tables have the weights.
        features: Inputs of the module. If `example` is None, examples are made from them. The graph takes
            the outputs of the features' transforms, not their inputs.
        example: Arguments of the module, with at least two samples. A tuple gives several arguments.

    Raises:
        ConfigError: Neither features nor an example are given, torch cannot export the module, or the graph
            does not compute the same as the module.
    """
    batches = [example, tree_map(_reversed, example)]
    if example is None:
        if features is None:
            raise ConfigError(
                "an ONNX file of a module needs what it is called with; name its --features, or call "
                "psfleet.serving.export(..., example=...)"
            )
        # The results of lookups become inputs of the graph, so the transforms, which come before the
        # lookups, are left out.
        batches = [_batch(_behind_transforms(features), n) for n in (2, 3)]
        for module in model.modules():
            if isinstance(module, FeatureEmbedding):
                module.features = _behind_transforms(module.features)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        graph = _Graph(model, runtime).eval()
        graph.take(batches[0])
        _write(where, graph)
        graph.take(batches[1])
        _check(where, graph)


def _write(where: Path, graph: _Graph) -> None:
    inputs = graph.inputs()
    axes = {name: {0: f"{name}.0"} for name, tensor in inputs.items() if tensor.ndim}
    try:
        _EXPORT(
            graph,
            tuple(inputs.values()),
            str(where),
            input_names=list(inputs),
            output_names=graph.outputs,
            dynamic_axes={**axes, **{name: {0: f"{name}.0"} for name in graph.outputs}},
            opset_version=_OPSET,
            **_NAMED,
        )
    except PsfleetError:
        raise
    except Exception as error:  # torch raises many types; the message names the operation
        raise ConfigError(
            f"torch makes no ONNX graph of the module: {str(error).strip().splitlines()[0]}"
        ) from None
    document = onnx_module().load(str(where))
    names = {name for node in document.graph.node for name in node.input}
    for unused in [
        graph_input for graph_input in document.graph.input if graph_input.name not in names
    ]:
        document.graph.input.remove(unused)  # ids: their rows are inputs, so no node reads the ids
    save_model(document, graph.look_ups.tables, where)


def _check(where: Path, graph: _Graph) -> None:
    """Refuse a graph in which a value of the traced example has become a constant.

    Runs the graph with another example: with such a constant, the outputs differ from the module's.
    """
    from onnx.reference import ReferenceEvaluator

    evaluator, inputs = ReferenceEvaluator(str(where)), graph.inputs()
    feed = {name: inputs[name].numpy() for name in evaluator.input_names if name in inputs}
    outputs = evaluator.run(None, feed) if len(feed) == len(evaluator.input_names) else []
    expected = graph(*inputs.values())
    arrays = expected if isinstance(expected, tuple) else (expected,)
    same = len(outputs) == len(arrays) and all(
        np.allclose(computed, reference.numpy(), rtol=1e-4, atol=1e-5)
        for computed, reference in zip(outputs, arrays, strict=True)
    )
    if not same:
        raise ConfigError(
            f"the graph of {type(graph.model).__name__} does not compute what the module does for other "
            "inputs; let it take all inputs as tensors or by its FeatureEmbedding, without Python numbers "
            "made of them"
        )


def _reversed(leaf: Any) -> Any:
    return leaf.flip(0) if isinstance(leaf, Tensor) and leaf.ndim else leaf


def _behind_transforms(features: FeatureSet) -> FeatureSet:
    """Return the features without their transforms, so that they take the transforms' results."""
    return FeatureSet(replace(feature, transform=(), inputs=(), dtype=None) for feature in features)


def _batch(features: FeatureSet, samples: int) -> dict[str, Any]:
    """Return a batch of `samples` samples, with two ids for each feature, and with numbers for Number
    features.
    """
    batch: dict[str, Any] = {}
    for member in features:
        if not isinstance(member, Feature):
            values = np.linspace(-samples, 1, samples * member.dim, dtype=np.float32)
            batch[member.name] = values.reshape(samples, member.dim)
        elif member.pooling == "none" and not member.last:
            raise ConfigError(
                f"feature {member.name!r} has as many rows as ids, of which no ONNX graph knows the samples; "
                "give it a pooling, or `last`"
            )
        else:
            batch[member.name] = [[samples + i, i] for i in range(samples)]
    return batch
